# /// program
# ranks = 2
# losses = 'sum'
# ///
"""Micro-batches with different numbers of tokens, whose loss is the mean over all tokens of a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 32))
if not ALONE:
    init_process_group()
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)  # the sum over ranks: losses are parts of the mean over all tokens
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(4):
    tokens, labels = torch.randint(32, (12, 9)), torch.randint(32, (12, 9))
    labels[torch.arange(9) >= torch.randint(1, 10, (12, 1))] = -100  # rows have 1 to 9 tokens
    tokens, labels = own(tokens), own(labels)
    counted = (labels != -100).sum()
    if not ALONE:
        dist.all_reduce(counted)
    total = 0.0
    micro_batches = list(zip(tokens.split(3), labels.split(3), strict=True))
    for index, (inputs, targets) in enumerate(micro_batches):
        if not ALONE:
            model.set_requires_gradient_sync(index == len(micro_batches) - 1)
        logits = model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / counted
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    report_step(total)

report_weights(model)
if not ALONE:
    destroy_process_group()
