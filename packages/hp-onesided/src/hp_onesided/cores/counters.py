"""Counters in memory that ranks share, each written by one rank and waited for by another; by both cores."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from hp_onesided.cores.segment import Segment
from hp_onesided.cores.waiting import Failure, WaitError, ended, looks, wait_until, wake
from hp_onesided.planning.headers import DTYPES, OPS
from hp_onesided.port import port

_TURN = 1.0  # seconds


class Counters(Protocol):
    """What symmetric memory needs of a core."""

    def add(self, address: int, n: int) -> None:
        """Count up, after all that this rank has written before; wake who waits.

        Args:
            address: of the counter, which this rank alone writes.
            n: what is added.
        """
        ...

    def wait(self, address: int, value: int, peer: int, limit: float) -> None:
        """Wait until a counter has reached a value.

        Args:
            address: of the counter, in this rank's memory.
            value: that it reaches.
            peer: whose counter it is.
            limit: seconds.

        Raises:
            WaitError: it won't.
        """
        ...

    def reduce(self, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
        """Reduce in the order of the parts, as `hp_onesided.port.Port.reduce` does."""
        ...


class NativeCounters:
    """Counters by the compiled core.

    Args:
        core: the library.
        segments: of each rank.
        processes: a descriptor of each other rank's process, by rank.
    """

    def __init__(self, core: ctypes.CDLL, segments: Sequence[Segment], processes: Mapping[int, int]) -> None:
        size = len(segments)
        self._core, self._segments, self._size, self._looks = core, segments, size, looks(size)
        self._processes = (ctypes.c_int * size)(*(processes.get(peer, -1) for peer in range(size)))

    def add(self, address: int, n: int) -> None:
        """Count up."""
        self._core.hp_add(address, n)

    def wait(self, address: int, value: int, peer: int, limit: float) -> None:
        """Wait for a counter."""
        guilty = ctypes.c_int(peer)
        place = address, value, self._segments[peer].address, self._processes, self._size
        deadline = time.monotonic() + limit
        while True:  # in turns, between which the interpreter sees an interrupt
            left = deadline - time.monotonic()
            why = self._core.hp_await(*place, min(left, _TURN), *self._looks, ctypes.byref(guilty))
            if why != Failure.LATE or left <= _TURN:
                break
        if why:
            raise WaitError(Failure(why), peer if why == Failure.LATE else guilty.value)

    def reduce(self, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
        """Reduce in the order of the parts."""
        inputs = (ctypes.c_uint64 * len(parts))(*parts)
        self._core.hp_reduce(DTYPES.index(dtype), OPS.index(op), target, inputs, len(parts), nbytes)


class PythonCounters:
    """Counters by Python, which wakes always: the call is what other ranks' look is ordered by.

    Args:
        segments: of each rank.
        processes: a descriptor of each other rank's process, by rank.
    """

    def __init__(self, segments: Sequence[Segment], processes: Mapping[int, int]) -> None:
        self._segments, self._processes, self._lock = segments, processes, threading.Lock()

    def add(self, address: int, n: int) -> None:
        """Count up."""
        with self._lock:  # of this rank's threads
            ctypes.c_uint64.from_address(address).value += n
        wake(address)

    def wait(self, address: int, value: int, peer: int, limit: float) -> None:
        """Wait for a counter."""
        counter = ctypes.c_uint64.from_address(address)

        def reached() -> bool:
            return counter.value >= value

        def failed() -> None:
            dead, left = ended(self._processes), self._segments[peer].has_left()
            if reached():  # it came meanwhile, and then ended or left
                return
            if dead is not None:
                raise WaitError(Failure.DIED, dead)
            if left:
                raise WaitError(Failure.LEFT, peer)

        if not wait_until(address, reached, limit, failed):
            raise WaitError(Failure.LATE, peer)

    def reduce(self, target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
        """Reduce in the order of the parts."""
        port().reduce(target, parts, nbytes, dtype, op)


def counters_by(
    loaded: ctypes.CDLL | None, segments: Sequence[Segment], processes: Mapping[int, int]
) -> NativeCounters | PythonCounters:
    """Return the counters of the compiled core, or of Python.

    Args:
        loaded: the compiled core; None is Python's.
        segments: of each rank.
        processes: a descriptor of each other rank's process, by rank.
    """
    return PythonCounters(segments, processes) if loaded is None else NativeCounters(loaded, segments, processes)
