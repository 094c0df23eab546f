"""Reads: which rank reads which range of a file, each byte once; and, for conversions, one tensor's bytes in order.

Note [Units]
    A file is divided into units, each of which one rank reads completely, so that it can verify the unit alone. A unit
    is what one checksum is of where that is a contiguous range: in the layout of the save each rank then reads its own
    bytes. Else it is a block. Of the ranks that want bytes of a unit, one reads it, checks it, and sends the others
    what they want. All ranks know all requests and compute the same transfers, so no message announces another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from hp_checkpoint.disk.files import Chunk, Entry
from hp_checkpoint.disk.storage import opened, read_at
from hp_checkpoint.layout.tensors import Piece, chunk_pieces, clip, move, runs, scale

# ---- one tensor's bytes in order, for conversions, which one process runs ----
_RANGE_BYTES = 16 << 20
_CALL_BYTES = 4096
"""Bytes whose reading takes less than another system call: the smallest that a disk reads anyway."""


def stream(entry: Entry, folder: Path) -> Iterator[np.ndarray]:
    """List the bytes of a tensor, row-major, in parts of whole elements.

    Args:
        entry: of the tensor.
        folder: of the checkpoint.
    """
    for start in range(0, entry.kind.nbytes, _RANGE_BYTES):
        yield read_range(entry, folder, start, min(start + _RANGE_BYTES, entry.kind.nbytes))


def read_range(entry: Entry, folder: Path, start: int, stop: int) -> np.ndarray:
    """Read a range of a tensor's bytes, row-major, wherever its chunks are.

    Args:
        entry: of the tensor.
        folder: of the checkpoint.
        start: the first byte.
        stop: the end.
    """
    data = np.empty(stop - start, np.uint8)
    if not entry.chunks:
        path = folder / entry.file
        with opened(path) as descriptor:
            read_at(descriptor, data, entry.offset + start, path)
    for chunk in entry.chunks:
        parts = [_swapped(part) for piece in _by_tensor(entry, chunk) for part in clip(piece, start, stop)]
        if parts:
            path = folder / chunk.file
            with opened(path) as descriptor:
                _fill(data, start, parts, descriptor, path)
    return data


def _fill(data: np.ndarray, start: int, parts: Sequence[Piece], descriptor: int, path: Path) -> None:
    """Read parts of a tensor: with what is between them if that is little for the calls it saves, else run by run.

    Args:
        data: to fill.
        start: where it starts in the tensor.
        parts: in bytes of the file, with the tensor's bytes as the local ones.
        descriptor: of the file.
        path: of the file.
    """
    low, high = min(part.first for part in parts), max(part.end for part in parts)
    count = sum(part.count for part in parts)
    apart = all(part.count == 1 or part.stride >= part.length for part in parts)  # else `clip` can't cut them
    if count > 1 and apart and high - low <= max(2 * sum(part.size for part in parts), _CALL_BYTES * count):
        for at in range(low, high, _RANGE_BYTES):
            block = np.empty(min(_RANGE_BYTES, high - at), np.uint8)
            read_at(descriptor, block, at, path)
            for part in (inner for each in parts for inner in clip(each, at, at + len(block))):
                source, target = (block, part.first - at, part.stride), (data, part.local - start, part.local_stride)
                move(part.length, part.count, *source, *target)
    elif len(parts) > 1:
        for part in parts:
            _fill(data, start, [part], descriptor, path)
    else:
        for there, here in runs(parts[0]):
            read_at(descriptor, data[here - start : here - start + parts[0].length], there, path)


@lru_cache(maxsize=1024)
def _by_tensor(entry: Entry, chunk: Chunk) -> tuple[Piece, ...]:
    """Return a chunk's pieces in bytes of the tensor, by which `clip` cuts them, with the file's as the local ones."""
    pieces = chunk_pieces(entry.kind.shape, (), (), (), chunk)
    return tuple(_swapped(scale(piece, entry.kind.itemsize, chunk.offset)) for piece in pieces)


def _swapped(piece: Piece) -> Piece:
    """Exchange the places where runs are, and their distance, with those where they go; twice it is the same piece.

    >>> _swapped(Piece(first=8, length=2, count=3, stride=4, local=0, local_stride=2))
    Piece(first=0, length=2, count=3, stride=2, local=8, local_stride=4)
    """
    return Piece(piece.local, piece.length, piece.count, piece.local_stride, piece.first, piece.stride)


# ---- a checkpoint, read by all ranks together ----
COLUMNS = 5
"""Of a request: number of the file, and first, length, count and stride of a piece, in bytes of it."""

PER_ROUND = 8 << 20
"""Bytes that a rank begins to read between two collectives; a unit more is the most that it reads."""


class Units:
    """The units of several files, numbered in the order of the files and their offsets: see Note [Units].

    Args:
        sizes: bytes of each file.
        cuts: the offsets at which the units of each file start, ascending from 0.
    """

    def __init__(self, sizes: Sequence[int], cuts: Sequence[Sequence[int]]) -> None:
        self.bases = np.cumsum([0, *sizes], dtype=np.int64)
        """Where each file starts in the sequence of all files' bytes."""
        starts = [base + np.array(own, dtype=np.int64) for base, own in zip(self.bases, cuts)]
        self.starts = np.concatenate([*starts, self.bases[-1:]])
        """Where each unit starts in that sequence, and its end."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def size(self, unit: int) -> int:
        """Return the bytes of a unit."""
        return int(self.starts[unit + 1] - self.starts[unit])

    def range_of(self, unit: int, file: int) -> tuple[int, int]:
        """Return where a unit starts and ends in its file."""
        return int(self.starts[unit] - self.bases[file]), int(self.starts[unit + 1] - self.bases[file])

    def at(self, addresses: np.ndarray) -> np.ndarray:
        """Return the units at places in the sequence of all files' bytes."""
        return np.searchsorted(self.starts, addresses, side="right") - 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of one unit that one rank sends to another, or has itself.

    Attributes:
        round: number of the collective that carries them.
        reader: the rank that reads the unit.
        rank: the rank that wants the bytes.
        file: the file's number.
        unit: the unit's number.
        request: the number of the request among the rank's own.
        pieces: the part of the request inside the unit.
        place: bytes of the reader's other units before this one, in its round.
    """

    round: int
    reader: int
    rank: int
    file: int
    unit: int
    request: int
    pieces: tuple[Piece, ...]
    place: int

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The part of one rank in the reading of a checkpoint.

    Attributes:
        rounds: number of collectives, the same on all ranks.
        units: (round, unit) that this rank reads, in order.
        sends: what others, or this rank, want of these units, in the order of (round, rank, unit, request).
        receives: what this rank wants, in the order of (round, reader, unit, request).
        remote: some rank wants bytes that another one reads; else nothing has to be communicated.
    """

    rounds: int
    units: tuple[tuple[int, int], ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    remote: bool


def request_rows(requests: Iterable[tuple[int, Piece]]) -> np.ndarray:
    """Return requests, pairs of a file's number and a piece in bytes, as rows to be shared with the other ranks."""
    rows = [(file, each.first, each.length, each.count, each.stride) for file, each in requests]
    return np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)


def exchange(requests: Sequence[np.ndarray], rank: int, units: Units, *, per_round: int = PER_ROUND) -> Exchange:
    """Plan one rank's part in the reading of all requests.

    A unit is read by a rank that wants about as much of it as any other, so that bytes wanted by one rank only are
    not moved; among several the one with the fewest units reads it.

    Args:
        requests: of each rank, as `request_rows` gives them.
        rank: whose part to return.
        units: of the files.
        per_round: bytes after which a rank waits for the others, which bounds its memory.
    """
    ranks = np.repeat(np.arange(len(requests)), [len(each) for each in requests])
    rows = np.concatenate([each.reshape(-1, COLUMNS) for each in requests])
    numbers = np.concatenate([np.arange(len(each)) for each in requests])
    file, first, length, count, stride = rows.T
    begin = units.bases[file] + first
    end = begin + (count - 1) * stride + length
    low, high = units.at(begin), units.at(end - 1)
    of_row = np.repeat(np.arange(len(rows)), high - low + 1)
    passed = np.cumsum(high - low + 1) - (high - low + 1)
    unit = low[of_row] + np.arange(len(of_row)) - passed[of_row]
    overlap = np.minimum(end[of_row], units.starts[unit + 1]) - np.maximum(begin[of_row], units.starts[unit])
    weight = overlap * (length * count / (end - begin))[of_row]
    reader = _readers(unit, ranks[of_row], weight, len(requests), len(units))
    number, place = np.divmod(_bytes_before(reader, np.diff(units.starts), len(requests)), per_round)
    rounds = int(number[reader >= 0].max()) + 1 if len(rows) else 0

    def transfers(mine: np.ndarray) -> list[Transfer]:
        result = []
        for at in mine.tolist():
            row, where = of_row[at], int(unit[at])
            parts = clip(Piece(*rows[row][1:].tolist()), *units.range_of(where, int(file[row])))
            if parts:
                source = int(reader[where])
                own = int(ranks[row]), int(file[row]), where, int(numbers[row])
                result.append(Transfer(int(number[where]), source, *own, parts, int(place[where])))
        return result

    sends = transfers(np.flatnonzero(reader[unit] == rank))
    receives = transfers(np.flatnonzero(ranks[of_row] == rank))
    return Exchange(
        rounds,
        tuple((int(number[each]), int(each)) for each in np.flatnonzero(reader == rank)),
        tuple(sorted(sends, key=lambda each: (each.round, each.rank, each.unit, each.request))),
        tuple(sorted(receives, key=lambda each: (each.round, each.reader, each.unit, each.request))),
        bool((reader[unit] != ranks[of_row]).any()),
    )


def reads(
    pieces: Iterable[Piece], *, over_read: float = 2.0, gap: int = 64 << 10, chunk: int = 64 << 20
) -> tuple[tuple[int, int], ...]:
    """Return the ranges to read for pieces of a file: neighbours are merged, while little is read in vain.

    Args:
        pieces: in bytes of the file.
        over_read: the most bytes read for each one wanted, in a range that was merged.
        gap: bytes between two pieces that may be read in vain whatever their share. Default 64 KiB.
        chunk: the largest range that merging makes.
    """
    wanted = sorted((start, start + piece.length) for piece in pieces for start, _ in runs(piece))
    merged: list[list[int]] = []  # start, stop, wanted
    for start, stop in wanted:
        if merged and start <= merged[-1][1]:
            merged[-1][2] += max(0, stop - merged[-1][1])
            merged[-1][1] = max(merged[-1][1], stop)
            continue
        if merged:
            last = merged[-1]
            useful, span = last[2] + stop - start, stop - last[0]
            if span <= chunk and span <= over_read * useful and start - last[1] <= max(gap, useful):
                last[1], last[2] = stop, useful
                continue
        merged.append([start, stop, stop - start])
    return tuple((start, stop) for start, stop, _ in merged)


def _readers(key: np.ndarray, ranks: np.ndarray, weight: np.ndarray, world: int, size: int) -> np.ndarray:
    """Return the reader of each unit, -1 for one that nobody wants."""
    reader = np.full(size, -1, dtype=np.int64)
    if not len(key):
        return reader
    pair = key * world + ranks
    order = np.argsort(pair, kind="stable")
    starts = np.flatnonzero(np.diff(pair[order], prepend=-1))
    total = np.add.reduceat(weight[order], starts)
    keys, owners = np.divmod(pair[order][starts], world)
    begin = np.flatnonzero(np.diff(keys, prepend=-1))
    sizes = np.diff(begin, append=len(keys))
    enough = total >= 0.9 * np.repeat(np.maximum.reduceat(total, begin), sizes)
    candidates = np.add.reduceat(enough.astype(np.int64), begin)
    firsts = np.minimum.reduceat(np.where(enough, np.arange(len(keys)), len(keys)), begin)
    reader[keys[begin]] = owners[firsts]
    load = np.bincount(owners[firsts[candidates == 1]], minlength=world)
    for at in np.flatnonzero(candidates > 1):
        among = slice(begin[at], begin[at] + sizes[at])
        ranks_here = owners[among][enough[among]]
        chosen = ranks_here[load[ranks_here].argmin()]
        load[chosen] += 1
        reader[keys[begin[at]]] = chosen
    return reader


def _bytes_before(reader: np.ndarray, sizes: np.ndarray, world: int) -> np.ndarray:
    """Return for each unit the bytes that its reader reads before it."""
    before = np.zeros(len(reader), dtype=np.int64)
    order = np.argsort(reader, kind="stable")
    order = order[reader[order] >= 0]
    total = np.cumsum(sizes[order]) - sizes[order]
    firsts = np.searchsorted(reader[order], np.arange(world))
    counts = np.bincount(reader[order], minlength=world)
    before[order] = total - np.repeat(total[np.minimum(firsts, max(len(total) - 1, 0))], counts) if len(order) else 0
    return before
