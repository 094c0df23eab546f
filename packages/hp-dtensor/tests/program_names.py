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
    }
