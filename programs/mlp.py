# /// program
# ranks = 2
# ///
"""A plain loop: blocks sharded one by one, AdamW, gradients clipped."""

import torch
from torch import nn

from hp_fsdp import clip_grad_norm_, fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)), nn.Linear(16, 4))
if not ALONE:
    init_process_group()
    for block in model:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    x, y = own(torch.randn(8, 16)), own(torch.randn(8, 4))
    loss = (model(x) - y).square().mean()
    loss.backward()
    clip = torch.nn.utils.clip_grad_norm_ if ALONE else clip_grad_norm_
    clip(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
