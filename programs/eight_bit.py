# /// program
# ranks = 2
# tolerance = 1e-6
# ///
"""AdamW with states in eight bits, the same codes on any number of ranks."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_optim import AdamW8bit
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = AdamW8bit(model.parameters(), lr=1e-3, compiled=False)

for _ in range(5):
    x = own(torch.randn(8, 64))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
