# /// program
# ranks = 2
# ///
"""A DataLoader with workers and torch's sampler for ranks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
rows = TensorDataset(torch.randn(32, 8), torch.randn(32, 4))
sampler = None
if not ALONE:
    init_process_group()
    fully_shard(model)
    sampler = DistributedSampler(rows, shuffle=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(2):
    for x, y in DataLoader(rows, batch_size=8 // RANKS, sampler=sampler, num_workers=2):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
