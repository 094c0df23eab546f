"""Reads: who reads which block of which file, so that each byte is read once over all ranks.

Note [Blocks]
    A file is divided into blocks. Checksums are of the parts of a block, so a block that is read completely can be
    verified by its reader alone. Of the ranks that want bytes of a block, one reads it, checks it, and sends the others
    what they want. All ranks know all requests and compute the same transfers, so no message announces another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hp_checkpoint.pieces import Piece, clip, runs

__all__ = ["Exchange", "Transfer", "exchange", "reads", "request_rows"]

COLUMNS = 5
"""Of a request: number of the file, and first, length, count and stride of a piece, in bytes of it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of one block that one rank sends to another, or has itself.

    Attributes:
        round: number of the collective that carries them.
        reader: the rank that reads the block.
        rank: the rank that wants the bytes.
        file: the file's number.
        block: the block's number in the file.
        request: the number of the request among the rank's own.
        pieces: the part of the request inside the block.
    """

    round: int
    reader: int
    rank: int
    file: int
    block: int
    request: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The part of one rank in the reading of a checkpoint.

    Attributes:
        rounds: number of collectives, the same on all ranks.
        blocks: (round, file, block) that this rank reads, in order.
        sends: what others, or this rank, want of these blocks, in the order of (round, rank, block, request).
        receives: what this rank wants, in the order of (round, reader, block, request).
        remote: some rank wants bytes that another one reads; else nothing has to be communicated.
    """

    rounds: int
    blocks: tuple[tuple[int, int, int], ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    remote: bool


def request_rows(requests: Iterable[tuple[int, Piece]]) -> np.ndarray:
    """Return requests, pairs of a file's number and a piece in bytes, as rows to be shared with the other ranks."""
    rows = [(file, each.first, each.length, each.count, each.stride) for file, each in requests]
    return np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)


def exchange(requests: Sequence[np.ndarray], rank: int, *, block_bytes: int, per_round: int = 8) -> Exchange:
    """Plan one rank's part in the reading of all requests.

    A block is read by a rank that wants about as much of it as any other, so that bytes wanted by one rank only are
    not moved; among several the one with the fewest blocks reads it.

    Args:
        requests: of each rank, as `request_rows` gives them.
        rank: whose part to return.
        block_bytes: bytes of a block.
        per_round: blocks that a rank reads between two collectives, which bounds its memory.
    """
    ranks = np.repeat(np.arange(len(requests)), [len(each) for each in requests])
    rows = np.concatenate([each.reshape(-1, COLUMNS) for each in requests])
    numbers = np.concatenate([np.arange(len(each)) for each in requests])
    file, first, length, count, stride = rows.T
    end = first + (count - 1) * stride + length
    files = int(file.max()) + 1 if len(rows) else 0
    blocks = int(-(-end.max() // block_bytes)) if len(rows) else 0
    low, high = first // block_bytes, (end - 1) // block_bytes
    of_row = np.repeat(np.arange(len(rows)), high - low + 1)
    block = (
        low[of_row] + np.arange(len(of_row)) - np.repeat(np.cumsum(high - low + 1) - (high - low + 1), high - low + 1)
    )
    key = file[of_row] * blocks + block
    overlap = np.minimum(end[of_row], (block + 1) * block_bytes) - np.maximum(first[of_row], block * block_bytes)
    weight = overlap * (length * count / (end - first))[of_row]
    reader = _readers(key, ranks[of_row], weight, len(requests), files * blocks)
    position = _positions(reader, len(requests))
    rounds = int(position.max()) // per_round + 1 if len(rows) else 0

    def transfers(mine: np.ndarray) -> list[Transfer]:
        result = []
        for at in mine.tolist():
            row, where = of_row[at], int(block[at])
            request = Piece(*(int(value) for value in rows[row][1:]))
            parts = clip(request, where * block_bytes, (where + 1) * block_bytes)
            if parts:
                number, source = int(position[key[at]]) // per_round, int(reader[key[at]])
                transfer = Transfer(number, source, int(ranks[row]), int(file[row]), where, int(numbers[row]), parts)
                result.append(transfer)
        return result

    sends = transfers(np.flatnonzero(reader[key] == rank))
    receives = transfers(np.flatnonzero(ranks[of_row] == rank))
    own = [(int(position[at]) // per_round, *divmod(int(at), blocks)) for at in np.flatnonzero(reader == rank)]
    return Exchange(
        rounds,
        tuple(sorted(own)),
        tuple(sorted(sends, key=lambda each: (each.round, each.rank, each.file, each.block, each.request))),
        tuple(sorted(receives, key=lambda each: (each.round, each.reader, each.file, each.block, each.request))),
        bool((reader[key] != ranks[of_row]).any()),
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
    """Return the reader of each block, -1 for a block that nobody wants."""
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


def _positions(reader: np.ndarray, world: int) -> np.ndarray:
    """Return the number of each block among those of its reader."""
    position = np.full(len(reader), -1, dtype=np.int64)
    order = np.argsort(reader, kind="stable")
    order = order[reader[order] >= 0]
    counts = np.bincount(reader[order], minlength=world)
    position[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return position
