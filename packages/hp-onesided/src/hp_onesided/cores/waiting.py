"""Waiting for a counter in shared memory: a moment of looking, then asleep until it moves or its rank is gone.

Note [How a rank waits]
    A rank looks a few times, gives its core away a few times, and then sleeps in the kernel until the counter moves
    (a futex); with the compiled core sooner in a group of more ranks than cores, where looking takes time from those
    that it waits for. It wakes after 50 ms in any case, and looks whether a rank of the group has ended (a descriptor
    of its process becomes readable), has left the group, or whether this process has given up. So ranks that outnumber
    the cores don't take them from those that are waited for, and no signal or message is needed to end a wait.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Mapping
from enum import IntEnum

from hp_platform.extend import usable_cores

SPINS = 200
YIELDS = 20
SLICE = 0.05
"""Seconds after which a sleeping rank looks whether the others live."""
_FUTEX = {"x86_64": 202}
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1


class Failure(IntEnum):
    """Why a collective can't be done; the numbers are the native core's."""

    DIED = 1
    LATE = 2
    REFUSED = 3
    LEFT = 4
    ABORTED = 5


class WaitError(Exception):
    """A wait that can't end well.

    Args:
        failure: why.
        peer: the rank of the group that it comes from.
    """

    def __init__(self, failure: Failure, peer: int) -> None:
        super().__init__(failure, peer)
        self.failure, self.peer = failure, peer


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_SLICE = _Time(0, int(SLICE * 1e9))


def lacking() -> str | None:
    """Say what this machine lacks for waiting without a compiled core, None if nothing.

    Stores by Python have no order but the processor's own, so a counter may only be trusted where stores are seen in
    the order in which they were made.
    """
    if sys.platform != "linux":
        return f"it needs Linux, not {sys.platform}"
    if platform.machine() not in _FUTEX:
        return f"on {platform.machine()} it needs a C++ compiler: stores are seen out of order there"
    return None


@functools.cache
def _syscall() -> Callable[..., int]:
    return ctypes.CDLL(None, use_errno=True).syscall


def looks(ranks: int) -> tuple[int, int]:
    """Say how often a rank of a group of so many looks, and how often it gives its core away, before it sleeps."""
    return (SPINS // 4, YIELDS // 10) if ranks > usable_cores() else (SPINS, YIELDS)


def wake(address: int) -> None:
    """Wake all that sleep on a counter."""
    _syscall()(_FUTEX[platform.machine()], ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)


def ended(descriptors: Mapping[int, int], patience: float = 0.0) -> int | None:
    """Find a peer whose process has ended.

    Args:
        descriptors: of each peer's process.
        patience: seconds to wait for one that is ending.
    """
    poll = select.poll()
    for descriptor in descriptors.values():
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(1000 * patience)}
    return next((peer for peer, descriptor in descriptors.items() if descriptor in ready), None)


def wait_until(address: int, reached: Callable[[], bool], limit: float, failed: Callable[[], None]) -> bool:
    """Wait for a counter: Note [How a rank waits].

    Args:
        address: of the counter, 4 bytes.
        reached: tells whether it has counted far enough.
        limit: seconds.
        failed: called in each slice; raises what ends the wait.

    Returns:
        False if the limit is over.
    """
    for _ in range(YIELDS // 2):
        if reached():
            return True
        os.sched_yield()
    counter = ctypes.c_uint32.from_address(address)
    deadline = time.monotonic() + limit
    while True:
        seen = counter.value
        if reached():
            return True
        number = _FUTEX[platform.machine()]
        _syscall()(number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen), ctypes.byref(_SLICE), None, 0)
        if reached():
            return True
        failed()
        if time.monotonic() > deadline:
            return reached()
