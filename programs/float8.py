# /// program
# ranks = 2
# tolerance = 1e-6
# ///
"""Layers of torchao that multiply in float8, whose weights are gathered as the bytes that are multiplied."""

import dataclasses

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from hp_fsdp import clip_grad_norm_, fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, report_step, report_weights

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 176), nn.GELU(), nn.Linear(176, 64)) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(64, 10))
config = dataclasses.replace(Float8LinearConfig(enable_fsdp_float8_all_gather=not ALONE), emulate=True)
model = convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name != "3")
if not ALONE:
    init_process_group()
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(5):
    x = torch.randn(48, 64)  # the same on all ranks: a scale of activations is of what a rank multiplies
    loss = model(x).logsumexp(-1).mean()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
