"""PyTorch's random generators."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hp_platform.torch.devices import present


def seed(seed: int) -> None:
    """Seed the default generators of all devices."""
    if _alone():
        # torch.manual_seed keeps a stack trace for each accelerator that it knows: half a millisecond.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@functools.cache
def _alone() -> bool:
    """Return True on a machine without accelerator."""
    return present() == ("cpu",)


def get_state(device: torch.device | str) -> torch.Tensor:
    """Get the state of the default generator of a device."""
    return _module(device).get_rng_state()


def set_state(device: torch.device | str, state: torch.Tensor) -> None:
    """Set the state of the default generator of a device."""
    _module(device).set_rng_state(state)


def _module(device: torch.device | str) -> Any:
    kind = torch.device(device).type
    return torch if kind in ("cpu", "meta") else torch.get_device_module(kind)
