"""Hyperparameters as ranks compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_TOLD = ("lr", "weight_decay", "momentum", "nesterov", "betas", "eps")


def told(number: int, group: Mapping[str, Any]) -> str:
    """Describe hyperparameters of a group that are no part of a plan, the same for the same numbers.

    Args:
        number: of the group.
        group: with its hyperparameters.
    """
    return f"group {number} with " + ", ".join(f"{key}={_shown(group[key])}" for key in _TOLD if key in group)


def _shown(value: Any) -> str:
    """Return a hyperparameter as ranks compare it: the last bits may differ where their processors do."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return "a tensor"  # reading it would wait for the device
        value = value.item()
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
