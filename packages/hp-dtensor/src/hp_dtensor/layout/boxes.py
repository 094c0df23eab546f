"""A rank's shard of a tensor as boxes (offsets and sizes in the global tensor), the form that checkpoints use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.sharding import cut_dim, intervals, normalize, parts, ragged_of


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the global tensor, and the position of its elements in the local tensor.

    Attributes:
        offsets: the box's start in the global tensor.
        sizes: the box's length along each dim.
        ragged: None without a ``RaggedShard``. Otherwise the local dim into which it flattens dims, the start in it of
            the block with the box's elements, and the block's shape.
        at: the box's start in that block, or in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ragged: tuple[int, int, tuple[int, ...]] | None
    at: tuple[int, ...]


@lru_cache(maxsize=4096)
def boxes(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Box, ...]:
    """Return the non-empty boxes on the rank at ``coordinate``, in the order of its local elements.

    A tensor without elements is one empty box on every rank, so that it appears in a checkpoint.

    Example:
        >>> [(box.offsets, box.sizes) for box in boxes((3, 4), (RaggedShard((0, 1), (5, 7)),), (2,), (1,))]
        [((1, 1), (1, 3)), ((2, 0), (1, 4))]

    Args:
        shape: the global shape.
        placements: one for each mesh axis.
        mesh_shape: ranks on each mesh axis.
        coordinate: the rank's index on each mesh axis.

    Raises:
        ValueError: a ``Partial``, or a placement that doesn't fit the shape.
    """
    placements = normalize(placements, shape, mesh_shape)
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{placements} of shape {shape} has a Partial, so no rank has elements of the value. Reduce it first:"
            " tensor.reduce_partial()"
        )
    if not prod(shape):
        return (Box((0,) * len(shape), shape, None, (0,) * len(shape)),)
    axes = list(zip(placements, mesh_shape, coordinate, strict=True))
    local_intervals = [
        intervals(size, [axis for axis in axes if cut_dim(axis[0]) == dim]) for dim, size in enumerate(shape)
    ]
    local = tuple(sum(length for _, length in each) for each in local_intervals)
    ragged = ragged_of(placements)
    if ragged is None:
        return tuple(_split(local_intervals, (0,) * len(shape), local, None))
    axis, placement = ragged
    first, count = (placement.dims[0] if placement.dims else 0), len(placement.dims)
    before, flattened, after = local[:first], local[first : first + count], local[first + count :]
    result: list[Box] = []
    done = 0
    for start, length in parts(placement, prod(flattened), mesh_shape[axis])[coordinate[axis]]:
        for offsets, sizes in range_boxes(flattened, start, start + length):
            padded = ((0,) * len(before)) + offsets + ((0,) * len(after))
            result += _split(local_intervals, padded, before + sizes + after, (first, done, sizes))
            done += prod(sizes)
    return tuple(result)


def range_boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a range of a box's flattened elements into boxes: the end of a row, complete rows, the start of a row.

    Each is a pair (offsets, sizes):
    ``list(range_boxes((3, 4), 1, 10)) == [((0, 1), (1, 3)), ((1, 0), (1, 4)), ((2, 0), (1, 2))]``

    Args:
        sizes: the box's length along each dim.
        start: the first element of the range.
        stop: the first element after the range.
    """
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = prod(sizes[1:])
    while start < stop:
        index, within = divmod(start, row)
        rows = (stop - start) // row
        if within == 0 and rows:
            yield (index, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            start += rows * row
        else:
            end = min(stop, (index + 1) * row)
            for offsets, inner in range_boxes(sizes[1:], within, end - index * row):
                yield (index, *offsets), (1, *inner)
            start = end


def _split(
    local_intervals: Sequence[Sequence[tuple[int, int]]],
    offsets: Sequence[int],
    sizes: Sequence[int],
    ragged: tuple[int, int, tuple[int, ...]] | None,
) -> Iterator[Box]:
    """Split a box in local indices into boxes in global indices: several if it spans intervals that don't touch."""
    overlaps = []
    for intervals_, offset, size in zip(local_intervals, offsets, sizes, strict=True):
        combination, passed = [], 0
        for start, length in intervals_:
            low, high = max(offset, passed), min(offset + size, passed + length)
            if low < high:
                combination.append((start + low - passed, high - low, low - offset))
            passed += length
        overlaps.append(combination)
    shift = (0,) * len(sizes) if ragged else tuple(offsets)
    for combination in itertools.product(*overlaps):
        yield Box(
            tuple(overlap[0] for overlap in combination),
            tuple(overlap[1] for overlap in combination),
            ragged,
            tuple(overlap[2] + by for overlap, by in zip(combination, shift, strict=True)),
        )
