"""Random generators on PyTorch."""

from __future__ import annotations

from typing import Any

import torch

_seed: int | None = None


def manual_seed(seed: int) -> None:
    """Seed the default generators of all devices, to be called with the same seed on every rank.

    The generators' states are then equal on all ranks, which is what the distributed random numbers start from:
    replicated data draws the same numbers everywhere, and sharded data the numbers of its place in the whole.

    Args:
        seed: any integer that `torch.manual_seed` takes.
    """
    global _seed
    torch.manual_seed(seed)
    _seed = seed


def seeded() -> int | None:
    """Get the seed last given to `manual_seed`; None says that the ranks' generators may differ."""
    return _seed


def get_state(device: torch.device | str) -> torch.Tensor:
    """Get the state of the default generator of a device."""
    return _module(device).get_rng_state()


def set_state(device: torch.device | str, state: torch.Tensor) -> None:
    """Set the state of the default generator of a device."""
    _module(device).set_rng_state(state)


def _module(device: torch.device | str) -> Any:
    kind = torch.device(device).type
    return torch if kind == "cpu" else torch.get_device_module(kind)
