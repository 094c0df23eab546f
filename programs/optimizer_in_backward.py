# /// program
# ranks = 2
# ///
"""An optimizer for each parameter, which steps as soon as its gradient is there."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model[0])
    fully_shard(model)
optimizers = {weight: torch.optim.AdamW([weight], lr=1e-2) for weight in model.parameters()}


def step_now(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(step_now)
for _ in range(5):
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
