# /// program
# ranks = 2
# alone = false
# exit = 1
# failed = { 1 = 1 }
# error = 'ValueError: this sample cannot be read'
# short = true
# ///
"""An exception on one rank: the launcher says which, and the others end."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, own, report_step

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(5):
    x = own(torch.randn(8, 8))
    if step == 3 and RANK == 1:
        raise ValueError("this sample cannot be read")
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())
if not ALONE:
    destroy_process_group()
