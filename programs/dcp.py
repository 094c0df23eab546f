# /// program
# ranks = 2
# constant = false  # the first model is garbage, which nobody collects
# ///
"""torch's distributed checkpoint: saved from one model, loaded into a new one with a new optimizer."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hp_fsdp import (
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def make():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    if not ALONE:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


if not ALONE:
    init_process_group()
torch.manual_seed(0)
model, optimizer = make()
for step in range(6):
    if step == 3 and not ALONE:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id="checkpoint")
        random = torch.get_rng_state()
        model, optimizer = make()
        torch.set_rng_state(random)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id="checkpoint")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        del state
    x = own(torch.randn(8, 8))
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
