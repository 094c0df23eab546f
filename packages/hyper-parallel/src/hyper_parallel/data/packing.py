"""Packing: whole documents side by side in rows of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.data.documents import DataError
from hyper_parallel.data.samples import IGNORED, Rows, permuted


class Documents(Protocol):
    """Documents by number, with their lengths known, such as a `TokenFile`'s."""

    starts: NDArray[np.int64]

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of a document."""
        ...

    def trained(self, number: int) -> NDArray[np.uint8] | None:
        """Return for each token of a document whether a loss is taken of it; None where one is taken of all."""
        ...


class Joined:
    """The documents of several sources, one source after the other.

    Args:
        sources: at least one.
    """

    def __init__(self, sources: Sequence[Documents]) -> None:
        self._sources = list(sources)
        sizes = [np.diff(source.starts) for source in self._sources]
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes), dtype=np.int64)])
        self._ends = np.cumsum([len(each) for each in sizes])

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of a document."""
        source, own = self._place(number)
        return source.document(own)

    def trained(self, number: int) -> NDArray[np.uint8] | None:
        """Return for each token of a document whether a loss is taken of it; None where one is taken of all."""
        source, own = self._place(number)
        return source.trained(own)

    def _place(self, number: int) -> tuple[Documents, int]:
        source = int(np.searchsorted(self._ends, number, side="right"))
        return self._sources[source], number - (int(self._ends[source - 1]) if source else 0)


class Cut:
    """Documents to fine-tune on, none longer than a row.

    Args:
        documents: with masks.
        length: of a row.
        policy: of a longer one: "right" keeps its beginning, "left" its end, "drop" leaves it out, "refuse" raises. One
            that has no token to train left is left out.
        together: so many documents are kept or left out together: 2 for pairs.

    Attributes:
        starts: of each document, and the end of the last.
        shortened: how many documents were cut.
        dropped: how many were left out.

    Raises:
        DataError: a document is longer, and the policy refuses that; or none is left.
    """

    def __init__(self, documents: Documents, length: int, policy: str, *, together: int = 1) -> None:
        self._documents, self._left = documents, policy == "left"
        sizes = np.diff(documents.starts)
        longer = np.flatnonzero(sizes > length)
        if longer.size and policy == "refuse":
            message = f"example {longer[0]} has {sizes[longer[0]]} tokens, and a sample takes {length}"
            raise DataError(message, f"make data.sequence_length {sizes.max()}, or name another data.truncation")
        kept = np.ones(len(sizes), bool)
        for number in longer.tolist():
            mask = documents.trained(number)
            left = mask if mask is None else mask[-length:] if self._left else mask[:length]
            kept[number] = policy != "drop" and (left is None or bool(left[1:].any()))
        kept = kept.reshape(-1, together).all(1).repeat(together)
        self._numbers = np.flatnonzero(kept)
        own = np.minimum(sizes[self._numbers], length)
        self.shortened, self.dropped = int((sizes[self._numbers] > length).sum()), int((~kept).sum())
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(own, dtype=np.int64)])
        if not self._numbers.size:
            message = f"no example has a token to train in {length} tokens"
            raise DataError(message, "make data.sequence_length larger")

    def __len__(self) -> int:
        return len(self._numbers)

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of a document that are left."""
        return self._part(self._documents.document(int(self._numbers[number])), number)

    def trained(self, number: int) -> NDArray[np.uint8] | None:
        """Return for each of them whether a loss is taken of it; None where one is taken of all."""
        mask = self._documents.trained(int(self._numbers[number]))
        return None if mask is None else self._part(mask, number)

    def _part(self, values: NDArray[Any], number: int) -> NDArray[Any]:
        size = int(self.starts[number + 1] - self.starts[number])
        return values[len(values) - size :] if self._left else values[:size]


class Padded:
    """Rows of `sequence_length` tokens, each a document and padding after it, in an order that begins anew each epoch.

    No attention mask is needed: what comes after a token is not seen by a causal model.

    Args:
        documents: none longer than a row.
        sequence_length: tokens of a row.
        seed: of the order; None is that of the documents.
        width: documents of a sample, which follow each other.
        padding: the token that fills the end of a row.
    """

    def __init__(
        self, documents: Documents, sequence_length: int, *, seed: int | None, width: int = 1, padding: int = 0
    ) -> None:
        self._documents, self._length, self._seed, self._padding = documents, sequence_length, seed, padding
        self._width = width

    def __len__(self) -> int:
        return (len(self._documents.starts) - 1) // self._width

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the samples of these numbers, `width` rows each."""
        chosen = permuted(np.asarray(numbers, dtype=np.int64), count=len(self), seed=self._seed)
        documents = (chosen[:, None] * self._width + np.arange(self._width)).ravel()
        rows = _empty(len(documents), self._length, self._padding)
        sizes = np.diff(self._documents.starts)
        for place, document in enumerate(documents.tolist()):
            _fill(rows, place, self._documents, [Piece(document, 0, int(sizes[document]))])
        return rows


class Piece(NamedTuple):
    """Tokens `[start, start + length)` of a document."""

    document: int
    start: int
    length: int


class Packed:
    """Rows of `sequence_length` tokens that hold whole documents, in an order that begins anew each epoch.

    Documents are taken in a random order, `window` at a time, cut where they are longer than a row, and each piece is
    put into the row that it fills best (best fit, decreasing). The rows of a window depend on the seed, the epoch and
    the window alone. How many rows come before it is counted as it is reached: to go on in the middle of an epoch
    packs the windows before once more, without reading their tokens.

    An epoch ends with the row of its last document, so epochs may differ in their number of rows; `len` is that of the
    first.

    Args:
        documents: with their lengths.
        sequence_length: tokens of a row.
        seed: of the order.
        window: documents that are packed together.
        padding: the token that fills the end of a row.
    """

    def __init__(
        self, documents: Documents, sequence_length: int, *, seed: int, window: int = 1024, padding: int = 0
    ) -> None:
        self._documents, self._length, self._seed = documents, sequence_length, seed
        self._window, self._padding = window, padding
        self._count = len(documents.starts) - 1
        if int(documents.starts[-1]) == int(documents.starts[0]):
            raise DataError("there are no tokens to pack", "give files with text")
        self._windows = -(-self._count // window)
        self._ends: list[int] = []  # rows up to the end of each window, over all epochs
        self._packed: tuple[int, list[list[Piece]]] = (-1, [])

    def __len__(self) -> int:
        while len(self._ends) < self._windows:
            self._count_next()
        return self._ends[self._windows - 1]

    def rows(self, numbers: NDArray[np.int64]) -> Rows:
        """Return the rows of these numbers."""
        numbers = np.asarray(numbers, dtype=np.int64)
        while numbers.size and (not self._ends or self._ends[-1] <= int(numbers.max())):
            self._count_next()
        rows = _empty(len(numbers), self._length, self._padding)
        windows = np.searchsorted(np.array(self._ends), numbers, side="right")
        for place in np.argsort(windows, kind="stable"):
            window = int(windows[place])
            first = self._ends[window - 1] if window else 0
            _fill(rows, int(place), self._documents, self._pack(window)[int(numbers[place]) - first])
        return rows

    def _count_next(self) -> None:
        self._ends.append((self._ends[-1] if self._ends else 0) + len(self._pack(len(self._ends))))

    def _pack(self, window: int) -> list[list[Piece]]:
        """Return the pieces of each row of a window."""
        if self._packed[0] != window:
            epoch, number = divmod(window, self._windows)
            places = np.arange(number * self._window, min((number + 1) * self._window, self._count))
            chosen = permuted(places + epoch * self._count, count=self._count, seed=self._seed)
            rows = pack(_pieces(self._documents, chosen, self._length), self._length)
            order = permuted(np.arange(len(rows)), count=max(1, len(rows)), seed=self._seed + window + 1)
            self._packed = window, [rows[row] for row in order]
        return self._packed[1]


def _empty(count: int, length: int, padding: int) -> Rows:
    shape, sizes = (count, length), np.zeros(count, np.int64)
    return Rows(np.full(shape, padding, np.int64), np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int64), sizes)


def _fill(rows: Rows, number: int, documents: Documents, pieces: Sequence[Piece]) -> None:
    """Write pieces of documents into one of the rows, one after the other."""
    row, place = rows[number], 0
    for piece in pieces:
        own = slice(piece.start, piece.start + piece.length)
        tokens, trained = documents.document(piece.document)[own], documents.trained(piece.document)
        row.tokens[place : place + piece.length] = tokens
        labels = tokens if trained is None else np.where(trained[own], tokens.astype(np.int64), IGNORED)
        row.labels[place + 1 : place + piece.length] = labels[1:]
        row.positions[place : place + piece.length] = np.arange(piece.length)
        place += piece.length
    row.positions[place:] = np.arange(len(row.positions) - place)
    rows.sizes[number] = place


def pack(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Put each piece into the fullest row that has room for it, longest pieces first.

    >>> [[piece.length for piece in row] for row in pack([Piece(0, 0, 3), Piece(1, 0, 5), Piece(2, 0, 2)], 5)]
    [[5], [3, 2]]
    """
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for piece in sorted(pieces, key=lambda piece: (-piece.length, piece)):
        place = bisect_left(room, (piece.length, -1))
        free, row = room.pop(place) if place < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        if free > piece.length:
            insort(room, (free - piece.length, row))
    return rows


def _pieces(documents: Documents, chosen: NDArray[np.int64], length: int) -> list[Piece]:
    sizes = documents.starts[chosen + 1] - documents.starts[chosen]
    return [
        Piece(int(document), start, min(length, int(size) - start))
        for document, size in zip(chosen, sizes, strict=True)
        for start in range(0, int(size), length)
    ]
