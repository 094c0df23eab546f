# /// program
# ranks = 4
# ///
"""Hooks on fully sharded parameters, set before forward and between forward and backward, and a penalty kept aside."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
penalties = []
model[0].register_forward_hook(lambda layer, inputs, output: penalties.append(layer.bias.sum() * 0.01))
if not ALONE:
    init_process_group()
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model)
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
    penalties.clear()
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    handles = [model[2].weight.register_hook(each) for each in (note, shorten)]
    handles.append(model[2].bias.register_post_accumulate_grad_hook(clip))
    (loss + penalties[0]).backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach() + sum(norms))

report_weights(model)
if not ALONE:
    destroy_process_group()
