# /// program
# ranks = 2
# alone = false
# send = 'SIGTERM'
# step = 5
# exit = 1
# ///
"""SIGTERM to the launcher when the last step is done: nothing is left."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())
if not ALONE:
    destroy_process_group()
