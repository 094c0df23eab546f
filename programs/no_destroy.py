# /// program
# ranks = 2
# ///
"""A script that ends without destroy_process_group."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(3):
    x, y = own(torch.randn(8, 16)), own(torch.randn(8, 4))
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
