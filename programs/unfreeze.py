# /// program
# ranks = 2
# constant = false  # the body's gradients and states come later
# ///
"""A frozen body whose head is trained; later the body is trained, too."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
model = nn.Sequential(body, nn.Linear(16, 4))
body.requires_grad_(False)
if not ALONE:
    init_process_group()
    fully_shard(body)
    fully_shard(model)
optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2)

for step in range(8):
    if step == 4:
        body.requires_grad_(True)
        optimizer.add_param_group({"params": list(body.parameters()), "lr": 1e-3})
    x, y = own(torch.randn(8, 8)), own(torch.randn(8, 4))
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
