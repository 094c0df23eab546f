"""Memory that ran out on MindSpore, which does not tell what is alive."""

from __future__ import annotations

from typing import Any

from hyper_parallel.supervision.failed_steps import Spot, Storage

_SIGNS = ("memory not enough", "out of memory", "allocate memory failed", "alloc memory failed")


def ran_out(error: BaseException) -> bool:
    """Return True if the error says that there is no memory left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)
    )


def place(error: BaseException, model: Any) -> Spot:
    """Say that it was in a step: nothing of a Cell shows in an error."""
    return Spot("forward or backward", "")


def storages(error: BaseException, model: Any, optimizer: Any) -> list[Storage]:
    """List none."""
    return []
