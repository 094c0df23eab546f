# /// program
# ranks = 2
# ///
"""A convolutional network whose batch norms see the rows of their rank, evaluated between steps."""

import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import destroy_process_group, init_process_group
from reporting import ALONE, own, report_step, report_weights

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
    nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 4),
)  # fmt: skip
if not ALONE:
    init_process_group()
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(4):
    x, y = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
    parts = list(zip(x.chunk(2), y.chunk(2), strict=True)) if ALONE else [(own(x), own(y))]
    model.train()
    losses = [nn.functional.cross_entropy(model(images), classes) for images, classes in parts]
    loss = sum(losses) / len(losses)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(x)
    report_step(loss.detach())

report_weights(model)
if not ALONE:
    destroy_process_group()
