# /// program
# [[launch]]
# ranks = 2
# send = "SIGKILL"
# to = 1
# step = 3
# exit = 1
# failed = { 1 = -9 }
#
# [[launch]]
# ranks = 3
# ///
"""Checkpoints: two ranks, of which one is killed; three ranks go on from the newest."""

import torch
from torch import nn

from hp_checkpoint import Checkpointer, Keep
from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(done, save):
    for step in range(done + 1, 7):
        torch.manual_seed(step)
        x = own(torch.randn(6, 8))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        save(step)
        report_step(loss.detach(), step)


if ALONE:
    train(0, lambda step: None)
else:
    with Checkpointer("checkpoints", keep=Keep(last=2)) as checkpoints:
        done = checkpoints.load(model, optimizer).step if checkpoints.steps() else 0
        train(done, lambda step: checkpoints.save(step, model, optimizer).wait())

report_weights(model)
if not ALONE:
    destroy_process_group()
