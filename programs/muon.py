# /// program
# ranks = 4
# tolerance = 1e-6  # Muon orthogonalizes in float32
# ///
"""Muon for hidden matrices and AdamW for the rest, under tensor parallelism and fully_shard."""

import torch
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_optim import get_hyper_lr_scheduler, get_hyper_optimizer
from hp_platform import destroy_process_group, init_process_group
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from reporting import ALONE, RANK, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
rows = slice(None)
if not ALONE:
    init_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh["dp"])
    rows = slice(RANK // 2 * 4, RANK // 2 * 4 + 4)  # the ranks of one tp group have the same
optimizer = get_hyper_optimizer(
    model,
    muon_params=["0.weight", "2.weight"],
    adamw_params=["4.weight", {"params": ["*.bias"], "weight_decay": 0.0}],
    muon_kwargs={"lr": 2e-2},
    adamw_kwargs={"lr": 1e-3},
)
schedule = get_hyper_lr_scheduler(optimizer, total_steps=6, warmup_steps=2, decay_style="WSD", lr_min=0.0)

for _ in range(6):
    x = torch.randn(8, 8)[rows]
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
