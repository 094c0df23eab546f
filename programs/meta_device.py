# /// program
# ranks = 2
# ///
"""A model built without memory: each rank fills its shards with the values that the whole would have."""

import torch
from torch import nn

from hp_dtensor import init_empty_weights, init_parameters
from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group, manual_seed
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
if ALONE:
    manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
else:
    init_process_group()
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    fully_shard(model)
    manual_seed(0)
    init_parameters(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1)
for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
