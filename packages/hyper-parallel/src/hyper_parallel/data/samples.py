"""Samples: rows of tokens by the number of a global sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data.errors import DataError
from hyper_parallel.data.order import permuted

# The label that the losses of torch, transformers and MindSpore leave out.
IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """Samples of one length, int64 arrays of shape (samples, sequence length).

    Attributes:
        tokens: the inputs.
        labels: the same, `IGNORED` where no token is to be predicted: a document's first and padding. A model compares
            them with the prediction of the place before, as those of transformers do.
        positions: counted from 0 in each document. Models of transformers that get them without an attention mask
            keep documents apart.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def joined(parts: Sequence[Rows], order: NDArray[np.int64]) -> Rows:
        """Concatenate parts; row `i` of the result is row `order[i]` of the parts together."""
        return Rows(*(np.concatenate([getattr(part, field.name) for part in parts])[order] for field in fields(Rows)))


class Samples(Protocol):
    """Samples by their global number: epoch after epoch, each an order of its own."""

    def __len__(self) -> int:
        """Count the samples of an epoch."""
        ...

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the samples of these numbers, from 0 on without end; as many rows of each."""
        ...


class Windows:
    """Windows of `sequence_length` tokens, cut from streams side by side.

    An epoch has each window once, in a random order. What remains at a stream's end is left out.

    Args:
        streams: one-dimensional arrays of integers, such as a `TokenFile`'s.
        sequence_length: tokens of a sample.
        seed: of the order.

    Raises:
        DataError: no stream has so many tokens.
    """

    def __init__(self, streams: Sequence[NDArray[Any]], sequence_length: int, *, seed: int) -> None:
        self._streams, self._length, self._seed = list(streams), sequence_length, seed
        self._ends = np.cumsum([len(stream) // sequence_length for stream in self._streams], dtype=np.int64)
        if not len(self):
            longest = max((len(stream) for stream in self._streams), default=0)
            message = f"one sample takes {sequence_length} tokens, but the longest stream has {longest}"
            raise DataError(message, "give more data, or make data.sequence_length smaller")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the windows of these numbers."""
        windows = permuted(numbers, count=len(self), seed=self._seed)
        tokens = np.empty((len(windows), self._length), dtype=np.int64)
        streams = np.searchsorted(self._ends, windows, side="right")
        for stream in np.unique(streams):
            of_stream = np.flatnonzero(streams == stream)
            first = int(self._ends[stream - 1]) if stream else 0
            starts = (windows[of_stream] - first) * self._length
            tokens[of_stream] = self._streams[stream][starts[:, None] + np.arange(self._length)]
        labels = tokens.copy()
        labels[:, 0] = IGNORED
        return Rows(tokens, labels, np.broadcast_to(np.arange(self._length, dtype=np.int64), tokens.shape).copy())
