# /// program
# ranks = 2
# ///
"""Other weights are loaded into a sharded model between two steps."""

import torch
from torch import nn

from hp_fsdp import fully_shard, load_full_state_dict
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
others = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).state_dict()
if not ALONE:
    init_process_group()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(6):
    if step == 2:
        model.load_state_dict(others)
    if step == 4 and ALONE:
        model.load_state_dict(others)
    elif step == 4:
        load_full_state_dict(model, others)
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
