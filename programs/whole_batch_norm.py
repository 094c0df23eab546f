# /// program
# ranks = 2
# ///
"""Batch norms that see the rows of all ranks: the batch is a DTensor sharded by rows."""

import torch
from torch import nn

from hp_dtensor import Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (RANKS,))
    distribute_module(model, mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    x, y = torch.randn(8, 3, 6, 6), torch.randint(4, (8,))
    if not ALONE:
        x, y = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Replicate()])
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
