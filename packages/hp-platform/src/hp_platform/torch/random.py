"""PyTorch's random generators."""

from __future__ import annotations

from typing import Any

import torch

seed = torch.manual_seed


def get_state(device: torch.device | str) -> torch.Tensor:
    """Get the state of the default generator of a device."""
    return _module(device).get_rng_state()


def set_state(device: torch.device | str, state: torch.Tensor) -> None:
    """Set the state of the default generator of a device."""
    _module(device).set_rng_state(state)


def _module(device: torch.device | str) -> Any:
    kind = torch.device(device).type
    return torch if kind == "cpu" else torch.get_device_module(kind)
