# /// program
# ranks = 2
# ///
"""Parameters that live on the host, and visit a cache of a fifth of their bytes: data parallel by gradients at home."""

import torch
from torch import nn

from hp_offload import checkpoint_wrapper, place
from hp_platform import collectives, destroy_process_group, get_platform, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(10)))
model[3][2].weight = model[4][2].weight  # tied
model[6][0].requires_grad_(False)
checkpoint_wrapper(model[1])
cache = 2 * sum(each.nbytes for each in model[0].parameters())
trained = [each for each in model.parameters() if each.requires_grad]
if not ALONE:
    init_process_group()
    placed = place(model, {"*": "host"}, cache=cache)
optimizer = torch.optim.AdamW(trained, lr=1e-2)

for _ in range(5):
    for _ in range(2):
        x = own(torch.randn(8, 16))
        loss = (model(x) - x).square().mean() / 2
        loss.backward()
    if not ALONE:
        for each in trained:
            collectives.all_reduce(each.grad, "sum", group=get_platform().groups.default_group())
            each.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    report = placed.report()
    assert report.planned and report.peak <= cache < report.host / 4.5, report
    destroy_process_group()
