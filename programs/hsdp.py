# /// program
# ranks = 4
# ///
"""Two replicas, each sharded over two ranks, evaluated between steps."""

import torch
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

model.eval()  # no dropout: each rank would draw its own
for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = (model(x) - x).square().mean()
    report_step(loss.detach() + after)

report_weights(model)
if not ALONE:
    destroy_process_group()
