# /// program
# ranks = 2
# ///
"""A loss of gradients: the backward of a backward through a sharded model."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(4):
    x = own(torch.randn(8, 8)).requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
