# /// program
# ranks = 2
# losses = 'sum'  # the last rank has it
# ///
"""A pipeline of two stages by 1F1B, each a part of one model."""

import torch
from torch import nn

from hp_pipeline import PipelineStage, Schedule1F1B
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, RANK, RANKS, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8))
per_rank = len(layers) // RANKS
own = range(RANK * per_rank, (RANK + 1) * per_rank)


def stage(x, target=None):
    for index in own:
        x = layers[index](x)
    return x if target is None else (x - target).square().mean()


if not ALONE:
    init_process_group()
    for index in set(range(len(layers))) - set(own):
        layers[index] = None  # other ranks have them
    schedule = Schedule1F1B(PipelineStage(stage, RANK, RANKS, device="cpu"), micro_batch_num=4)
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)

for _ in range(5):
    x = torch.randn(16, 8)
    target = x.roll(1, 1)
    if ALONE:
        loss = stage(x, target)
        loss.backward()
    else:
        losses = schedule.run(x, **({"target": target} if RANK == RANKS - 1 else {}))
        loss = torch.stack(losses).mean() if losses else torch.tensor(0.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(layers)
if not ALONE:
    destroy_process_group()
