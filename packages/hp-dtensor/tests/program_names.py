"""The names that the lines of a random program may use besides torch's, on one device and on DTensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def offloaded(compute: Callable[[], Any]) -> Any:
    """``compute()`` with what it saves packed by a user's hooks."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return compute()


def same(x: Any, *ignored: Any) -> Any:
    """A view of all of ``x``: on one device, moving does no more."""
    return x.view_as(x)


class Cubed(torch.autograd.Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Mixed(torch.autograd.Function):
    """Two arguments, the second a number, and two results, the second a sum."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any, of_sum: Any) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * y + of_sum, (grad * x).sum()


def mixed(x: Any, y: Any) -> Any:
    """Both results of ``Mixed`` in one."""
    product, total = Mixed.apply(x, y.mean())
    return product + 0.1 * total


def namespace(
    move: Callable[..., Any] = same, through_local: Any = same, through_full: Any = same, local: Any = same
) -> dict[str, Any]:
    """The names that lines may use; without arguments, those of one device.

    Args:
        move: ``move(x, "S0", "R")`` redistributes.
        through_local: takes a tensor to its local part and back.
        through_full: takes it to the whole, plain tensor and back.
        local: this rank's part.
    """

    def scaled_locally(x: Any) -> None:
        with torch.no_grad():
            local(x).mul_(0.5)

    def untied(x: Any) -> Any:
        """``x`` with no two elements alike: which of two equal ones is the largest is not defined."""
        return x + torch.arange(x.numel(), dtype=torch.float64).mul(0.37).sin().reshape(x.shape)

    return {
        "torch": torch,
        "F": F,
        "checkpoint": checkpoint,
        "move": move,
        "through_local": through_local,
        "through_full": through_full,
        "scaled_locally": scaled_locally,
        "offloaded": offloaded,
        "copy": copy,
        "untied": untied,
        "Cubed": Cubed,
        "mixed": mixed,
    }
