"""Process of a rank on torch: its settings before it joins the others, and how the loss of another rank shows."""

from __future__ import annotations

import torch

from hp_platform import LostRankError, get_platform
from hp_platform.extend import Place
from hyper_parallel.launching.launch import divide_threads

# How the loss of a peer shows: it ended, and its end is what has to be reported.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket Timeout",
)


def prepare(place: Place) -> None:
    """Choose the device and the number of threads."""
    torch.set_num_threads(divide_threads(place.local_world_size))
    get_platform().devices.set_device(place.local_rank)


def peer_lost(error: Exception) -> bool:
    """Return True if the error says that another rank is gone."""
    return isinstance(error, LostRankError) or any(sign in str(error) for sign in _PEER_LOST)
