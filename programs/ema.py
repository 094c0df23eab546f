# /// program
# ranks = 2
# ///
"""An average of the weights beside the model, sharded as it is, which judges each step."""

import copy

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
average = copy.deepcopy(model).requires_grad_(False)  # before: a sharded model is not copied
if not ALONE:
    init_process_group()
    fully_shard(model)
    fully_shard(average)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.1)
        judged = (average(x) - x).square().mean()
    report_step(loss.detach() + judged)

report_weights(model, average)
if not ALONE:
    destroy_process_group()
