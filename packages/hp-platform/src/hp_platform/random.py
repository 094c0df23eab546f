"""The random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hp_platform.port import port

_seed: int | None = None


def manual_seed(seed: int) -> None:
    """Seed the default generators of all devices, to be called with the same seed on every rank.

    The generators' states are then equal on all ranks, which is what the distributed random numbers start from:
    replicated data draws the same numbers everywhere, and sharded data the numbers of its place in the whole.

    Args:
        seed: any integer that `torch.manual_seed` takes; on MindSpore one from 0 on, and NumPy's generator is seeded
            with its last 32 bits too, as `mindspore.set_seed` does.
    """
    global _seed
    port().random.seed(seed)
    _seed = seed


def reseed(seed: int) -> None:
    """Seed the default generators of this rank alone, as for its own samples; `seeded` stays what it was.

    Args:
        seed: as of `manual_seed`.
    """
    port().random.seed(seed)


@contextmanager
def drawing(seed: int, *devices: Any) -> Iterator[None]:
    """Draw from a seed, as after `manual_seed`; afterwards `seeded` and the generators are what they were.

    Args:
        seed: as of `manual_seed`.
        devices: whose default generators are used.
    """
    global _seed
    before, states = _seed, [(device, get_state(device)) for device in devices]
    manual_seed(seed)
    try:
        yield
    finally:
        _seed = before
        for device, state in states:
            set_state(device, state)


def seeded() -> int | None:
    """Get the seed last given to `manual_seed`; None says that the ranks' generators may differ."""
    return _seed


def get_state(device: Any) -> Any:
    """Get the state of a device's default generator; MindSpore has one for all devices."""
    return port().random.get_state(device)


def set_state(device: Any, state: Any) -> None:
    """Set the state of a device's default generator to what `get_state` gave."""
    port().random.set_state(device, state)
