# /// program
# ranks = 4
# ///
"""Hooks on parameters of a tensor parallel model, set before the first forward and between forward and backward."""

import torch
from torch import nn

from hp_dtensor import init_device_mesh
from hp_platform import destroy_process_group, init_process_group
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from reporting import ALONE, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []


def note(gradient):
    norms.append(float(gradient.norm()))


def shorten(gradient):
    return gradient / gradient.norm()


def clip(weight):
    weight.grad.div_(weight.grad.norm() * 2)


model[0].weight.register_hook(note)
model[0].bias.register_post_accumulate_grad_hook(clip)
for _ in range(4):
    norms.clear()
    x = torch.randn(8, 8)
    loss = (model(x) - x).square().mean()
    handles = [model[2].weight.register_hook(each) for each in (note, shorten)]
    handles.append(model[0].weight.register_post_accumulate_grad_hook(clip))
    loss.backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach() + sum(norms))

report_weights(model)
if not ALONE:
    destroy_process_group()
