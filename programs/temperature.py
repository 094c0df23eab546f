# /// program
# ranks = 2
# ///
"""Logits divided by a temperature in place, as libraries for reinforcement learning do."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(4):
    tokens = own(torch.randint(16, (4, 6)))
    logits = model(tokens)
    logits.div_(0.7)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
