"""Descriptors of other ranks' processes, which become readable when a process ends; one a process, for all groups."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable

_lock = threading.Lock()
_descriptors: dict[int, int] = {}
_users: Counter[int] = Counter()


def hold(pid: int) -> int:
    """Get the descriptor of a process, which is released as often as it was got.

    Args:
        pid: of the process.

    Raises:
        OSError: there is no such process.
    """
    with _lock:
        if pid not in _descriptors:
            _descriptors[pid] = os.pidfd_open(pid)
        _users[pid] += 1
        return _descriptors[pid]


def release(pids: Iterable[int]) -> None:
    """Let go of descriptors; who lets go of one last closes it."""
    with _lock:
        for pid in pids:
            _users[pid] -= 1
            if not _users[pid]:
                os.close(_descriptors.pop(pid))
