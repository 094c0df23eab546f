# /// program
# ranks = 2
# ///
"""Sharded blocks, each compiled."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(2)))
if not ALONE:
    init_process_group()
for block in model:
    if not ALONE:
        fully_shard(block)
    block.compile()
if not ALONE:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(4):
    x = own(torch.randn(8, 16))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
