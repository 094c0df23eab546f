"""Batches that are read while the step before is computed."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hyper_parallel.data import Rows, Samples


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
    """This rank's rows of one batch after another; a thread reads the next one.

    Args:
        samples: to read.
        rows: this rank's slice of a batch.
        size: of a batch.
    """

    def __init__(self, samples: Samples, rows: slice, size: int) -> None:
        self._samples, self._rows, self._size = samples, rows, size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._coming: tuple[int, Future[Rows]] | None = None

    def take(self, sample: int) -> Batch:
        """Return the batch that begins with a global sample, and begin to read the one after it.

        Raises:
            DataError: as the samples do.
        """
        begun = time.perf_counter()
        if self._coming is None or self._coming[0] != sample:
            self._begin(sample)
        assert self._coming is not None
        rows = self._coming[1].result()
        wait = time.perf_counter() - begun
        self._begin(sample + self._size)
        return Batch(rows, wait)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _begin(self, sample: int) -> None:
        numbers = np.arange(sample + self._rows.start, sample + self._rows.stop)
        self._coming = sample, self._thread.submit(self._samples.rows, numbers)
