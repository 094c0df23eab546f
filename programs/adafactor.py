# /// program
# ranks = 2
# ///
"""Adafactor, whose states are means of whole rows and columns."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)

for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
