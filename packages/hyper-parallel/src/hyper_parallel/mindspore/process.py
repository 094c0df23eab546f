"""Process of a rank on MindSpore: its settings, how the loss of another rank shows, and memory that ran out."""

from __future__ import annotations

from typing import Any

import mindspore

from hp_platform import get_platform
from hp_platform.extend import Place
from hyper_parallel.supervision.run_end import Spot, Storage

# How the loss of a peer shows: it ended, and its end is what has to be reported.
_PEER_LOST = (
    "Connection closed",
    "Connection reset by peer",
    "Broken pipe",
    "connection refused",
    "timed out",
    "is abnormal",
    "disconnected",
)


def prepare(place: Place) -> None:
    """Choose the device, and how kernels are started.

    On CPU a kernel that is handed to another thread costs ten times what most kernels take, and its errors surface in a
    later call: kernels run where they are called.
    """
    devices = get_platform().devices
    devices.set_device(place.local_rank)
    if devices.kind == "cpu":
        mindspore.runtime.dispatch_threads_num(1)
        mindspore.runtime.launch_blocking()


def peer_lost(error: Exception) -> bool:
    return any(sign in str(error) for sign in _PEER_LOST)


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
