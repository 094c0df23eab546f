"""Models cut into stages, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hp_pipeline
from hp_pipeline import PipelineSchedule

WIDTH, CLASSES = 6, 5
SHAPES = {  # of each class of a schedule, how it places stages
    name: kind.shape
    for name, kind in vars(hp_pipeline).items()
    if isinstance(kind, type) and issubclass(kind, PipelineSchedule) and kind is not PipelineSchedule
}


class Block(nn.Module):
    """A residual block that writes to its input in place, as models do."""

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x.mul_(1.25) if self.in_place else x * 1.25
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Head(nn.Module):
    """Classes, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, target=None):
        logits = self.out(x)
        return logits if target is None else cross_entropy(logits, target)


class Net(nn.Module):
    """So many stages of uneven numbers of blocks, and a head in the last."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, WIDTH)
        self.parts = nn.ModuleList(nn.Sequential(*(Block() for _ in range(1 + index % 2))) for index in range(stages))
        self.head = Head()

    def forward(self, x, target=None):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.head(x, target)


class Stage(nn.Module):
    """One stage of a net, under the whole model's names."""

    def __init__(self, net: Net, index: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(index): net.parts[index]})
        if index == 0:
            self.first = net.first
        if index == len(net.parts) - 1:
            self.head = net.head

    def forward(self, x, target=None):
        if hasattr(self, "first"):
            x = self.first(x)
        for part in self.parts.values():
            x = part(x)
        return self.head(x, target) if hasattr(self, "head") else x


def batch(rows: int, kind: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x.to(kind), torch.randint(CLASSES, (rows,), generator=generator).to(kind)


def reference(stages: int, rows: int, micro_batches: int, steps: int = 2) -> tuple[Net, list[list[torch.Tensor]]]:
    """Train in one process, micro-batch by micro-batch; return the model and the losses."""
    net = Net(stages).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        pairs = zip(*(tensor.chunk(micro_batches) for tensor in batch(rows)), strict=True)
        losses.append([net(x.clone(), target) for x, target in pairs])
        for loss in losses[-1]:
            (loss / micro_batches).backward()
        optimizer.step()
    return net, losses
