# /// program
# ranks = 2
# ///
"""Blocks that are computed again or moved to the host, parameters on the host, all under fully_shard."""

import torch
from torch import nn

from hp_fsdp import CPUOffloadPolicy, fully_shard
from hp_offload import checkpoint_wrapper, swap_wrapper
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)))
checkpoint_wrapper(model[0])
swap_wrapper(model[1])
swap_wrapper(model[2])
if not ALONE:
    init_process_group()
    for block in model:
        fully_shard(block, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    x = own(torch.randn(8, 16))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
