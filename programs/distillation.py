# /// program
# ranks = 2
# ///
"""A frozen, sharded teacher and a smaller student."""

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5)).requires_grad_(False).eval()
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))
if not ALONE:
    init_process_group()
    fully_shard(teacher)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    x = own(torch.randn(8, 8))
    with torch.no_grad():
        wanted = log_softmax(teacher(x) / 2.0, -1)
    loss = kl_div(log_softmax(model(x) / 2.0, -1), wanted, reduction="batchmean", log_target=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
