"""Batches that are read while the steps before are computed."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hyper_parallel.data import DataError, Rows, Samples

_TOKENS, _BATCHES = 1 << 16, 32  # as many small batches are read at once


@dataclass(frozen=True)
class Batch:
    """This rank's part of a batch.

    Attributes:
        rows: its samples.
        wait: seconds for which the step waited for them.
    """

    rows: Rows
    wait: float


class Batches:
    """This rank's rows of one batch after another; a thread reads the next ones.

    Args:
        samples: to read.
        rows: this rank's slice of a batch.
        size: of a batch.
        sequence_length: of a sample.
    """

    def __init__(self, samples: Samples, rows: slice, size: int, *, sequence_length: int) -> None:
        self._samples, self._rows, self._size = samples, rows, size
        self._count = rows.stop - rows.start
        self._batches = min(_BATCHES, max(1, _TOKENS // (self._count * sequence_length)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._first, self._read = -1, None  # the batches at hand: the first one's first sample, and their rows
        self._coming: tuple[int, Future[Rows]] | None = None

    def take(self, sample: int) -> Batch:
        """Return the batch that begins with a global sample, and begin to read those after it.

        Raises:
            DataError: as the samples do.
        """
        begun = time.perf_counter()
        place = (sample - self._first) // self._size
        if self._read is None or not 0 <= place < self._batches or self._first + place * self._size != sample:
            if self._coming is None or self._coming[0] != sample:
                self._begin(sample)
            assert self._coming is not None
            try:
                self._first, self._read, place = sample, self._coming[1].result(), 0
            except DataError:  # of any of them, maybe one that the run never comes to
                rows = self._samples.rows(self._numbers(sample, 1))
                self._read = None
                return Batch(rows, time.perf_counter() - begun)
            self._begin(sample + self._batches * self._size)
        count = len(self._read) // self._batches  # a sample may have several rows
        rows = self._read[place * count : (place + 1) * count]
        return Batch(rows, time.perf_counter() - begun)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, sample: int) -> None:
        self._coming = sample, self._thread.submit(self._samples.rows, self._numbers(sample, self._batches))

    def _numbers(self, sample: int, batches: int) -> np.ndarray:
        firsts = np.arange(sample, sample + batches * self._size, self._size)
        return (firsts[:, None] + np.arange(self._rows.start, self._rows.stop)).ravel()
