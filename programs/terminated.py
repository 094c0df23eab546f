# /// program
# ranks = 2
# alone = false
# send = 'SIGTERM'
# step = 3
# exit = 1
# error = 'saved step'
# ///
"""SIGTERM, as a cluster sends it: the ranks agree on a last step, save it and end in order."""

import signal

import torch
import torch.distributed as dist
from torch import nn

from hp_checkpoint import Checkpointer
from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

with Checkpointer("checkpoints", background=False) as checkpoints:
    for step in range(1, 1000):
        x = own(torch.randn(8, 8))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report_step(loss.detach())
        stop = torch.tensor(float(bool(asked)))
        dist.all_reduce(stop)
        if stop:
            checkpoints.save(step, model, optimizer)
            print("saved step", checkpoints.steps()[-1])
            break
if not ALONE:
    destroy_process_group()
