"""Small models, and what tests compare of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block with dropout, a branch of its own and a parameter that no module holds."""

    def __init__(self, size: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * self.scale


class Net(nn.Module):
    def __init__(self, blocks: int = 3, size: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(blocks))
        self.head = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


def net(blocks: int = 3, dropout: float = 0.3, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net(blocks, dropout=dropout).to(dtype)


def gradients(
    model: Callable[..., torch.Tensor], steps: int = 3, size: int = 8, device: str = "cpu"
) -> list[torch.Tensor]:
    """The gradients of some steps, in order: those of the input, then of each parameter."""
    torch.manual_seed(1)
    result: list[torch.Tensor] = []
    for step in range(steps):
        values = torch.linspace(-1, 1, 4 * size, dtype=torch.float64).view(4, size) * (step + 1)
        parameters = [*model.parameters()]
        x = values.to(device, parameters[0].dtype).requires_grad_()
        model.zero_grad()
        model(x).backward()
        result += [x.grad, *(parameter.grad for parameter in parameters)]
    return result


def same_bits(changed: Callable[[nn.Module], object], model: nn.Module | None = None, steps: int = 3) -> nn.Module:
    """Compares a model's gradients with those of the model after `changed(block)` of each block; returns the latter."""
    model = model or net()
    other = copy.deepcopy(model)
    for block in other.blocks:
        changed(block)
    for index, (got, expected) in enumerate(zip(gradients(other, steps), gradients(model, steps), strict=True)):
        assert torch.equal(got, expected), index
    return other
