# /// program
# ranks = 1
# ///
"""One budget for parameters that visit the device and for activations, a third of what the plain program holds."""

import torch
from torch import nn

from hp_offload import fit_memory, place, trace_saved
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(10)))
if not ALONE:
    init_process_group()
    saved = sum(each.bytes for each in trace_saved(model, (torch.ones(8, 16),)))
    budget = (saved + sum(each.nbytes for each in model.parameters())) // 3
    placed = place(model, {"*": "host"})
    fit_memory(model, budget, placed=placed)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _ in range(5):
    x = torch.randn(8, 16)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    report = placed.report()
    assert report.planned and report.peak <= report.cache < budget, report
    destroy_process_group()
