"""Samples: rows of tokens by the number of a global sample, in a computed order, and batches of them, read ahead."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data.documents import DataError

_ROUNDS = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def permuted(numbers: NDArray[np.int64], *, count: int, seed: int | None) -> NDArray[np.int64]:
    """Return which of `count` items come at the places `numbers` of a random order.

    Each run of `count` places, an epoch, has every item once, in an order of its own. Nothing is stored: a
    generalised Feistel network over a grid of `a x b >= count` cells, whose few cells beyond `count` are walked over
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        numbers: places, from 0, of any shape.
        count: items of an epoch, at least 1.
        seed: another seed is another order; None is the order of the items themselves, in every epoch.

    >>> permuted(np.arange(10), count=5, seed=0).tolist()
    [1, 3, 2, 4, 0, 0, 2, 1, 3, 4]
    >>> permuted(np.arange(10), count=5, seed=None).tolist()
    [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    """
    if count < 1:
        raise ValueError(f"an order needs at least one item, got count={count}")
    places = np.asarray(numbers, dtype=np.int64)
    if places.size and int(places.min()) < 0:
        raise ValueError(f"places are counted from 0, got {int(places.min())}")
    if seed is None:
        return places % count
    epochs, rest = np.divmod(places.ravel(), count)
    keys = _mixed(epochs.astype(np.uint64) + _mixed(np.full(1, seed % 2**64, np.uint64)))
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    items = _network(rest.astype(np.uint64), keys, rows, columns)
    while (outside := np.flatnonzero(items >= count)).size:
        items[outside] = _network(items[outside], keys[outside], rows, columns)
    return items.astype(np.int64).reshape(places.shape)


def _network(cells: NDArray[np.uint64], keys: NDArray[np.uint64], rows: int, columns: int) -> NDArray[np.uint64]:
    """Permute the cells of a grid, by additions of one coordinate's hash to the other."""
    height, width = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(cells, width)
    for number in range(_ROUNDS):
        key = keys + np.uint64(number)
        if number % 2:
            column = (column + _mixed(row ^ key) % width) % width
        else:
            row = (row + _mixed(column ^ key) % height) % height
    return row * width + column


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 bits (SplitMix64: Steele, Lea and Flood, 2014)."""
    values = (values + np.uint64(1)) * _STEP
    values = (values ^ (values >> _SHIFTS[0])) * _FIRST
    values = (values ^ (values >> _SHIFTS[1])) * _SECOND
    return values ^ (values >> _SHIFTS[2])


# The label that the losses of torch, transformers and MindSpore leave out.
IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """Samples of one length, int64 arrays of shape (samples, sequence length) but for `sizes`.

    Attributes:
        tokens: the inputs.
        labels: the same, `IGNORED` where no token is to be predicted: a document's first and padding. A model compares
            them with the prediction of the place before, as those of transformers do.
        positions: counted from 0 in each document. Models of transformers that get them without an attention mask
            keep documents apart.
        sizes: how many tokens of each sample are not padding, of shape (samples,).
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    sizes: NDArray[np.int64]

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

    An epoch has each window once, in a random order or that of the streams. What remains at a stream's end is left out.

    Args:
        streams: one-dimensional arrays of integers, such as a `TokenFile`'s.
        sequence_length: tokens of a sample.
        seed: of the order; None is that of the streams.

    Raises:
        DataError: no stream has so many tokens.
    """

    def __init__(self, streams: Sequence[NDArray[Any]], sequence_length: int, *, seed: int | None) -> None:
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
        positions = np.broadcast_to(np.arange(self._length, dtype=np.int64), tokens.shape).copy()
        return Rows(tokens, labels, positions, np.full(len(tokens), self._length, np.int64))


# ---- a mixture of sources ----
_BLOCK = 4096


class Mixture:
    """Samples of several sources by weight.

    Of every 4,096 samples each source has its part, rounded to whole samples, in an order that the seed and the block
    decide. The source of a sample and its number there follow from its global number; a source that is smaller than
    its part begins its next epoch.

    Args:
        sources: what to mix; all have one sequence length.
        weights: one for each source, in any unit.
        seed: of the order.

    Raises:
        DataError: a weight is not positive, or so small that its source has no sample of a block.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], *, seed: int) -> None:
        if len(sources) != len(weights) or not sources:
            message = f"a mixture of {len(sources)} sources has {len(weights)} weights"
            raise DataError(message, "give one weight for each source", key="weights")
        if not all(weight > 0 and np.isfinite(weight) for weight in weights):
            message = f"the weights of a mixture are positive numbers, got {tuple(weights)}"
            raise DataError(message, "leave out a source that is not wanted", key="weights")
        total = sum(weights)
        exact = [_BLOCK * weight / total for weight in weights]
        for number, part in enumerate(exact):
            if part < 0.5:
                message = (
                    f"source {number} has weight {weights[number]:g} of {total:g}: under half a sample in {_BLOCK}"
                )
                raise DataError(message, "give it a larger weight, or leave it out", key="weights")
        self._sources, self._seed = list(sources), seed
        self._counts = _rounded(exact)
        self._last: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return max(
            -(-len(source) * _BLOCK // int(part)) for source, part in zip(self._sources, self._counts, strict=True)
        )

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the samples of these numbers."""
        sources, within = self.places(numbers)
        order = np.argsort(sources, kind="stable")
        parts = [
            self._sources[source].rows(within[order[sources[order] == source]])
            for source in np.unique(sources).tolist()
        ]
        return Rows.joined(parts, np.argsort(order, kind="stable"))

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and its number there: each source's are used one after the other."""
        blocks, places = np.divmod(np.asarray(numbers, dtype=np.int64), _BLOCK)
        sources, within = np.empty_like(places), np.empty_like(places)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            of_block, ranks = self._block(block)
            sources[here] = of_block[places[here]]
            within[here] = block * self._counts[sources[here]] + ranks[places[here]]
        return sources, within

    def _block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample of a block, and how many of the same source come before it there."""
        if self._last[0] != block:
            cards = permuted(np.arange(_BLOCK) + block * _BLOCK, count=_BLOCK, seed=self._seed)
            sources = np.searchsorted(np.cumsum(self._counts), cards, side="right")
            ranks = np.empty_like(sources)
            for source, count in enumerate(self._counts):
                ranks[sources == source] = np.arange(count)
            self._last = block, (sources, ranks)
        return self._last[1]


def _rounded(exact: Sequence[float]) -> NDArray[np.int64]:
    """Round to whole numbers of the same sum, at least 1 each: those with the largest rests get what remains."""
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    rests = np.argsort(counts - np.array(exact), kind="stable")
    for place in range(_BLOCK - int(counts.sum())):
        counts[rests[place % len(rests)]] += 1
    while counts.sum() > _BLOCK:
        counts[int(np.argmax(counts))] -= 1
    return counts


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
