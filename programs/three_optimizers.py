# /// program
# ranks = 2
# ///
"""NAdam, RMSprop and Adagrad, each on a part of one sharded model."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizers = [
    torch.optim.NAdam(model[0].parameters(), lr=1e-2),
    torch.optim.RMSprop(model[2].parameters(), lr=1e-3, momentum=0.9, centered=True, eps=1e-4),
    torch.optim.Adagrad(model[4].parameters(), lr=1e-2),
]

for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
