# /// program
# ranks = 8
# ///
"""An MLP whose layers are sharded over all three axes of a cube of ranks, which two of them exchange."""

import torch
from torch import nn

from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_platform import destroy_process_group, init_process_group
from hp_styles import ThreeDimensionalParallel, parallelize_module
from reporting import ALONE, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "y", "z"))
    styles = {
        "0": ThreeDimensionalParallel(input_axis="z", use_local_output=False),
        "2": ThreeDimensionalParallel(input_axis="y", use_local_output=False),
    }
    parallelize_module(model, mesh, styles)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    x = torch.randn(12, 8)
    if not ALONE:
        x = distribute_tensor(x, mesh, [Shard(0), Shard(0), Shard(1)])
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
