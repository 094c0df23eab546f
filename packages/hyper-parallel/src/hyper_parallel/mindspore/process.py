"""Process of a rank on MindSpore: its settings before it joins the others, and how a lost rank shows."""

from __future__ import annotations

import mindspore

from hp_platform import get_platform
from hp_platform.extend import Place

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
    """Return True if the error says that another rank is gone."""
    return any(sign in str(error) for sign in _PEER_LOST)
