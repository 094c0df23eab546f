"""Models, their gradients and formulas in float64 for the tests of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hp_optim.muon.rules import NS_VARIANTS


class Experts(nn.Module):
    """A stack of matrices, and one that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 12) / 4)
        self.down = nn.Parameter(torch.randn(4, 12, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("bei,eio->bo", torch.einsum("bi,eio->beo", x, self.up).tanh(), self.down)


class Net(nn.Module):
    """Linear layers wide, tall and square, experts, biases, a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.experts = Experts()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(24, 8)
        self.last = nn.Linear(8, 3)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.experts(self.first(x).tanh())
        return self.frozen(self.last(self.out(self.qkv(x).tanh()) + x))


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def whole_gradients(step: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """The same on every rank: numbers that no rank has to communicate for."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(tuple(parameter.shape), generator=generator, dtype=torch.float64)
        for name, parameter in model.named_parameters()
    }


def orthogonal(matrix: torch.Tensor, variant: str = "asym5", steps: int = 5, epsilon: float = 1e-10) -> torch.Tensor:
    """Newton-Schulz in float64, one matrix, as papers write it."""
    listed: Any = NS_VARIANTS[variant]
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + epsilon)
    for number in range(steps):
        a, b, c = listed[min(number, len(listed) - 1)]
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class MuonFormula:
    """Muon of one process as API and papers write it, a parameter and a matrix at a time.

    Args:
        lr: learning rate.
        decay: weight decay.
        momentum: of the average.
        nesterov: look ahead.
        variant: of the coefficients.
        rows: of the matrices into which a parameter's first dim is cut; None: it is not cut.
    """

    def __init__(
        self,
        lr: float = 0.02,
        decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        variant: str = "asym5",
        rows: int | None = None,
    ) -> None:
        self.lr, self.decay, self.momentum, self.nesterov = lr, decay, momentum, nesterov
        self.variant, self.rows = variant, rows
        self.buffers: dict[str, torch.Tensor] = {}

    def step(self, name: str, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        buffer = self.momentum * self.buffers.get(name, torch.zeros_like(gradient)) + gradient
        self.buffers[name] = buffer
        update = self.momentum * buffer + gradient if self.nesterov else buffer
        rows = self.rows or update.shape[-2]
        matrices = update.reshape(-1, rows, update.shape[-1])
        scale = 0.2 * max(rows, update.shape[-1]) ** 0.5
        made = torch.stack([scale * orthogonal(each, self.variant) for each in matrices]).reshape(update.shape)
        return weight * (1 - self.lr * self.decay) - self.lr * made
