# /// program
# ranks = 2
# ///
"""LBFGS, whose closure runs forward and backward several times a step."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=2)
x = own(torch.randn(16, 4))
y = x.sum(1, keepdim=True).sin()


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for _ in range(4):
    loss = optimizer.step(closure)
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
