"""Snapshot: one arena of shared memory for a copy of all of a rank's bytes, reused by each save."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

__all__ = ["Arena"]

_ALIGNMENT = 64


class Arena:
    """Memory that this process and its writer share; it grows as needed and never shrinks.

    Args:
        descriptor: of the arena of another process. Default: a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _create() if descriptor is None else descriptor
        self._array = np.empty(0, np.uint8)

    def reserve(self, size: int) -> np.ndarray:
        """Return the arena's bytes, at least ``size``; what it had before is undefined."""
        if len(self._array) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them: 512 times the page faults
                    mapped.madvise(mmap.MADV_HUGEPAGE)
            self._array = np.frombuffer(mapped, np.uint8)
        return self._array

    def store(self, sizes: Sequence[int], source: Callable[[int], np.ndarray]) -> list[int]:
        """Copy arrays into the arena, one after the other; return where each starts.

        Args:
            sizes: bytes of each array.
            source: returns the array of a number; one at a time, since it may be a copy from a device.
        """
        starts = [0, *np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()]
        memory = self.reserve(starts[-1])
        for number, size in enumerate(sizes):
            memory[starts[number] : starts[number] + size] = source(number)
        return starts

    def close(self) -> None:
        """Give the memory back; the writer keeps its own view of it as long as it writes."""
        self._array = np.empty(0, np.uint8)
        os.close(self.descriptor)


def _create() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hp-checkpoint")
    with tempfile.TemporaryFile() as file:  # a system without them: a file without a name
        return os.dup(file.fileno())
