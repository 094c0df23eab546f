# /// program
# ranks = 4
# ///
"""Matrices laid out by hand over two mesh axes, with hooks that are set between forward and backward."""

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
up, down = torch.randn(16, 8) / 4, torch.randn(8, 16) / 4
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    up = distribute_tensor(up, mesh, [Replicate(), Shard(0)])
    down = distribute_tensor(down, mesh, [Replicate(), Shard(1)])
weights = nn.ParameterList([nn.Parameter(up), nn.Parameter(down)])
optimizer = torch.optim.SGD(weights, lr=0.1)
norms = []


def note(*gradients):
    norms.extend(float(each.norm()) for gradient in gradients for each in gradient)


def clip(weight):
    weight.grad.div_(weight.grad.norm() * 2)


for _ in range(4):
    norms.clear()
    x = torch.randn(8, 8)
    if not ALONE:
        x = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    loss = ((x @ weights[0].T).tanh() @ weights[1].T - x).square().mean()
    handles = [
        weights[0].register_hook(lambda gradient: note([gradient])),
        weights[1].register_post_accumulate_grad_hook(clip),
        register_multi_grad_hook(list(weights), note),
    ]
    loss.backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach() + sum(norms))

report_weights(weights)
if not ALONE:
    destroy_process_group()
