"""Pieces: a rank's shard of a tensor as strided runs of the row-major global tensor, the language of all layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from hp_checkpoint.disk.files import Chunk
from hp_dtensor import Placement
from hp_dtensor.extend import Box, boxes, local_shape


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` runs of ``length`` elements, ``stride`` apart in the global tensor, and their place in the local one.

    Attributes:
        first: the first element's index in the global tensor, row-major.
        length: elements of a run.
        count: number of runs.
        stride: elements from the start of a run to the start of the next one; 0 where there is one run.
        local: the first element's index in the local tensor, row-major.
        local_stride: the runs' distance there; 0 where there is one run.
    """

    first: int
    length: int
    count: int = 1
    stride: int = 0
    local: int = 0
    local_stride: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """The index after the last element in the global tensor."""
        return self.first + (self.count - 1) * self.stride + self.length


@lru_cache(maxsize=8192)
def pieces(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor on the rank at ``coordinate``; none where its shard is empty.

    Example:
        >>> pieces((3, 4), (Shard(1),), (2,), (1,))
        (Piece(first=2, length=2, count=3, stride=4, local=0, local_stride=2),)

    Args:
        shape: the global shape.
        placements: one for each mesh axis; ``()`` for a tensor that is not distributed.
        mesh_shape: ranks on each mesh axis.
        coordinate: the rank's index on each mesh axis.

    Raises:
        ValueError: a ``Partial``, or a placement that doesn't fit the shape.
    """
    if not prod(shape):
        return ()
    local = local_shape(shape, placements, mesh_shape, coordinate)
    return tuple(
        piece
        for box in boxes(shape, placements, mesh_shape, coordinate)
        if prod(box.sizes)
        for piece in _of_box(box, _row_major(shape), local)
    )


def chunk_pieces(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    chunk: Chunk,
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor on a rank that a chunk has; ``first`` and ``stride`` count the chunk's elements.

    Example:
        >>> chunk_pieces((3, 4), (Shard(1),), (2,), (1,), Chunk((1, 0), (2, 3), "file", 0, (3, 1)))
        (Piece(first=2, length=1, count=2, stride=3, local=2, local_stride=2),)

    Args:
        shape: the global shape.
        placements: as those of `pieces`.
        mesh_shape: likewise.
        coordinate: likewise.
        chunk: a box of the tensor.
    """
    if not prod(shape):
        return ()
    local = local_shape(shape, placements, mesh_shape, coordinate)
    found: list[Piece] = []
    for box in boxes(shape, placements, mesh_shape, coordinate):
        low = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
        ends = [(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)]
        sizes = tuple(min(pair) - start for pair, start in zip(ends, low, strict=True))
        if all(size > 0 for size in sizes):
            at = tuple(own + start - offset for own, start, offset in zip(box.at, low, box.offsets, strict=True))
            within = tuple(start - offset for start, offset in zip(low, chunk.offsets, strict=True))
            found += _of_box(Box(within, sizes, box.ragged, at), chunk.strides, local)
    return tuple(found)


def box_pieces(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[Piece, ...]], ...]:
    """Return the boxes of a tensor on a rank: start, sizes, and pieces whose ``first`` counts the box's own elements.

    Example:
        >>> box_pieces((3, 4), (Shard(1),), (2,), (1,))
        (((0, 2), (3, 2), (Piece(first=0, length=6, count=1, stride=0, local=0, local_stride=0),)),)

    Args:
        shape: the global shape.
        placements: as those of `pieces`.
        mesh_shape: likewise.
        coordinate: likewise.
    """
    if not prod(shape):
        return ()
    local = local_shape(shape, placements, mesh_shape, coordinate)
    return tuple(
        (box.offsets, box.sizes, tuple(_of_box(Box((0,) * len(shape), box.sizes, box.ragged, box.at), strides, local)))
        for box in boxes(shape, placements, mesh_shape, coordinate)
        if prod(box.sizes)
        for strides in [_row_major(box.sizes)]
    )


def clip(piece: Piece, start: int, stop: int) -> tuple[Piece, ...]:
    """Return the part of a piece in the range ``[start, stop)`` of the global tensor, as at most three pieces."""
    if piece.first >= start and piece.end <= stop:
        return (piece,)
    if piece.count == 1:
        low, high = max(piece.first, start), min(piece.end, stop)
        return (Piece(low, high - low, local=piece.local + low - piece.first),) if low < high else ()
    first = max(0, -((piece.first + piece.length - start - 1) // piece.stride))  # the first run that ends after start
    last = min(piece.count - 1, (stop - 1 - piece.first) // piece.stride)  # the last one that starts before stop
    if first > last:
        return ()
    edges = [number for number in dict.fromkeys((first, last)) if not _inside(piece, number, start, stop)]
    inner_first, inner_last = first + (first in edges), last - (last in edges and last != first)
    result: list[Piece] = []
    if first in edges:
        result += clip(_part(piece, first, 1), start, stop)
    if inner_first <= inner_last:
        result.append(_part(piece, inner_first, inner_last - inner_first + 1))
    if last in edges and last != first:
        result += clip(_part(piece, last, 1), start, stop)
    return tuple(result)


def scale(piece: Piece, itemsize: int, offset: int) -> Piece:
    """Convert elements to bytes of a file in which the tensor starts at ``offset``."""
    return Piece(
        offset + piece.first * itemsize,
        piece.length * itemsize,
        piece.count,
        piece.stride * itemsize,
        piece.local * itemsize,
        piece.local_stride * itemsize,
    )


def runs(piece: Piece) -> Iterator[tuple[int, int]]:
    """List (global start, local start) of each run."""
    return (
        (piece.first + number * piece.stride, piece.local + number * piece.local_stride)
        for number in range(piece.count)
    )


def gather(array: np.ndarray, start: int, length: int, count: int, stride: int) -> np.ndarray:
    """Return runs of a 1-d array as one contiguous array: a view where they touch, else a copy."""
    if count == 1 or stride == length:
        return array[start : start + length * count]
    return np.ascontiguousarray(_strided(array, start, length, count, stride)).reshape(-1)


def move(
    length: int, count: int, source: np.ndarray, start: int, stride: int, target: np.ndarray, at: int, step: int
) -> None:
    """Copy runs of a 1-d array into another one.

    Args:
        length: elements of a run.
        count: number of runs.
        source: to copy from.
        start: its first run's first element.
        stride: elements from one run to the next; any where there is one run.
        target: to copy to.
        at: its first run's first element.
        step: elements from one run to the next; any where there is one run.
    """
    if count == 1 or stride == step == length:
        target[at : at + length * count] = source[start : start + length * count]
    else:
        _strided(target, at, length, count, step)[...] = _strided(source, start, length, count, stride)


def _strided(array: np.ndarray, start: int, length: int, count: int, stride: int) -> np.ndarray:
    if start < 0 or start + (count - 1) * stride + length > len(array):
        raise IndexError(f"{count} runs of {length} from {start}, {stride} apart, in an array of {len(array)}")
    step = array.itemsize
    return np.lib.stride_tricks.as_strided(array[start:], (count, length), (stride * step, step))


def _inside(piece: Piece, number: int, start: int, stop: int) -> bool:
    begin = piece.first + number * piece.stride
    return start <= begin and begin + piece.length <= stop


def _part(piece: Piece, number: int, count: int) -> Piece:
    """Return ``count`` of the runs from ``number`` on."""
    first, local = piece.first + number * piece.stride, piece.local + number * piece.local_stride
    if count == 1:
        return Piece(first, piece.length, local=local)
    return Piece(first, piece.length, count, piece.stride, local, piece.local_stride)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _of_box(box: Box, strides: tuple[int, ...], local: tuple[int, ...]) -> Iterator[Piece]:
    """Express a box by runs: the inner dims that are contiguous in both tensors are a run, the next ones its stride."""
    local_strides, base = _row_major(local), 0
    if box.ragged is not None:  # the local tensor has some dims flattened; the box lies in a block of them
        dim, start, block = box.ragged
        flat = local_strides[dim]
        within = tuple(flat * stride for stride in _row_major(block))
        local_strides, base = (*local_strides[:dim], *within, *local_strides[dim + 1 :]), start * flat
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    base += sum(at * stride for at, stride in zip(box.at, local_strides, strict=True))
    dims: list[tuple[int, int, int]] = []  # size, stride, local stride; the innermost last
    for size, stride, own in zip(box.sizes, strides, local_strides, strict=True):
        if dims and (dims[-1][1], dims[-1][2]) == (size * stride, size * own):
            dims[-1] = (dims[-1][0] * size, stride, own)
        elif size > 1:
            dims.append((size, stride, own))
    length = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    count, stride, own = dims.pop() if dims else (1, 0, 0)
    for indices in itertools.product(*(range(size) for size, _, _ in dims)):
        at = sum(index * each[1] for index, each in zip(indices, dims, strict=True))
        at_local = sum(index * each[2] for index, each in zip(indices, dims, strict=True))
        yield Piece(first + at, length, count, stride, base + at_local, own)
