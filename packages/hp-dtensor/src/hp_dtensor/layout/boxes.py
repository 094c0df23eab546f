"""Boxes of elements: those of a rank's shard, the form of checkpoints, and those that the same ranks hold.

Note [Boxes]
Along each dim the ranks' shards begin and end at a few edges. These divide the tensor into boxes whose elements are all
on the same ranks, so the cost depends on the number of boxes, not of elements. A ``RaggedShard`` is a range of several
flattened dims: if it ends inside a row, that row, and the element at which it ends, get edges of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hp_dtensor.layout.placements import Placement, RaggedShard
from hp_dtensor.layout.sharding import cut_dim, intervals, normalize, parts, ragged_of, run_view


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


DimRange = tuple[int, int]
"""The (start, stop) of a box along a dim."""


@dataclass(frozen=True)
class Holders:
    """The positions in a mesh that have each part of a tensor: Note [Boxes].

    Attributes:
        boxes: for each dim of the tensor the boxes along it, ascending.
        positions: for each box, in row-major order, the row-major positions in the mesh of the ranks that have it.
        empty: the positions without any element.
    """

    boxes: tuple[tuple[DimRange, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    empty: tuple[int, ...]

    def grids(self) -> Iterator[Grid]:
        """Yield grids of boxes along the last two sharded dims, one grid for each box along the others."""
        ndim = len(self.boxes)
        sharded_last = sorted(range(ndim), key=lambda dim: (len(self.boxes[dim]) > 1, dim))
        shown = sorted(sharded_last[-2:])
        others = [dim for dim in range(ndim) if dim not in shown]
        at = np.arange(len(self.positions)).reshape([len(boxes) for boxes in self.boxes])
        for index in product(*(range(len(self.boxes[dim])) for dim in others)):
            where: list[Any] = [slice(None)] * ndim
            for dim, box in zip(others, index, strict=True):
                where[dim] = box
            cells = at[tuple(where)].reshape([len(self.boxes[dim]) for dim in shown] or [1])
            fixed = tuple((dim, self.boxes[dim][box]) for dim, box in zip(others, index, strict=True))
            yield Grid(fixed, tuple(shown), tuple(self.boxes[dim] for dim in shown), cells)


@dataclass(frozen=True)
class Grid:
    """Boxes along at most two dims.

    Attributes:
        fixed: (dim, box) for each other dim.
        dims: the dims.
        boxes: for each of ``dims`` the boxes along it.
        cells: an array with a dim for each of ``dims`` (one element if there are none): the box's index in
            ``Holders.positions``.
    """

    fixed: tuple[tuple[int, DimRange], ...]
    dims: tuple[int, ...]
    boxes: tuple[tuple[DimRange, ...], ...]
    cells: Any

    def label(self, shape: Sequence[int]) -> str:
        """Return the part of a tensor of this shape as an index, ``[0:4, :, :]``; empty for the complete tensor."""
        index = [":"] * len(shape)
        for dim, (start, stop) in self.fixed:
            if stop - start < shape[dim]:
                index[dim] = f"{start}:{stop}"
        return "" if set(index) <= {":"} else f"[{', '.join(index)}]"


def who_holds(shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> Holders:
    """Return the positions in a mesh that have each part of a tensor.

    ``who_holds((5,), (Shard(0),), (2,))`` has boxes (0, 3) and (3, 5) along dim 0, at positions 0 and 1.

    Args:
        shape: the global shape.
        placements: one for each mesh axis; ``Partial`` counts as ``Replicate``.
        mesh_shape: ranks on each mesh axis.

    Raises:
        ValueError: a placement doesn't fit the shape.
    """
    placements = normalize(placements, shape, mesh_shape)
    coordinates = list(np.ndindex(*mesh_shape))
    dims = [[_local(dim, size, placements, mesh_shape, c) for c in coordinates] for dim, size in enumerate(shape)]
    edges = [{0, size, *(e for held in each for e in held.starts + held.stops)} for size, each in zip(shape, dims)]
    ragged = ragged_of(placements)
    ranges: list[Sequence[tuple[int, int]]] = []
    if ragged:
        for rank, coordinate in enumerate(coordinates):
            by_dim = [each[rank] for each in dims]
            ranges.append(_of_rank(ragged[1], by_dim, mesh_shape[ragged[0]], coordinate[ragged[0]]))
            for edge in chain.from_iterable(ranges[-1]):
                _add_edges(edges, ragged[1], by_dim, edge)
    bounds = [sorted(each) for each in edges]
    at = [np.array(each[:-1], dtype=np.int64) for each in bounds]
    holds = np.zeros((len(coordinates), *(len(each) for each in at)), dtype=bool)
    for rank in range(len(coordinates)):
        local = [_local_indices(each[rank], at[dim]) for dim, each in enumerate(dims)]
        holds[rank] = _mask([each >= 0 for each in local])
        if ragged:
            sizes = [sum(each[rank].lengths) for each in dims]
            offset = _offsets(local, sizes, ragged[1].dims)
            holds[rank] &= np.any([(start <= offset) & (offset < stop) for start, stop in ranges[rank]], axis=0)
    return _compressed(holds, bounds)


class _Intervals(NamedTuple):
    """A rank's intervals of a dim, in local order."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    lengths: tuple[int, ...]


def _local(dim: int, size: int, placements: Sequence[Placement], mesh: Sequence[int], at: Sequence[int]) -> _Intervals:
    """Return the intervals of a dim on the rank at coordinate ``at``, ignoring any ``RaggedShard``."""
    shards = [(p, n, i) for p, n, i in zip(placements, mesh, at, strict=True) if cut_dim(p) == dim]
    local = intervals(size, shards)
    return _Intervals(tuple(s for s, _ in local), tuple(s + n for s, n in local), tuple(n for _, n in local))


def _of_rank(placement: RaggedShard, dims: Sequence[_Intervals], n: int, index: int) -> list[tuple[int, int]]:
    """Return start and stop of a rank's ranges of the flattened ragged dims, at least one."""
    _, size, _ = run_view(placement, (), [sum(each.lengths) for each in dims])
    return [(start, start + length) for start, length in parts(placement, size, n)[index] or [(0, 0)]]


def _add_edges(edges: Sequence[set[int]], placement: RaggedShard, dims: Sequence[_Intervals], edge: int) -> None:
    """Add the edges, along each ragged dim, of the element at which a rank's range begins or has ended."""
    sizes = [sum(dims[dim].lengths) for dim in placement.dims]
    if not 0 < edge < prod(sizes):
        return
    for dim, local in zip(placement.dims, np.unravel_index(edge, sizes), strict=True):
        for start, length in zip(dims[dim].starts, dims[dim].lengths, strict=True):
            if local < length:
                edges[dim].update((start + int(local), start + int(local) + 1))
                break
            local -= length


def _local_indices(local: _Intervals, at: Any) -> Any:
    """Return the local index of each global index, -1 for those that are not on the rank."""
    indices = np.full(len(at), -1, dtype=np.int64)
    offset = 0
    for start, stop, length in zip(*local, strict=True):
        inside = (at >= start) & (at < stop)
        indices[inside] = at[inside] - start + offset
        offset += length
    return indices


def _mask(by_dim: Sequence[Any]) -> Any:
    """Return an array that is True for the boxes that the rank has along every dim."""
    mask = np.array(True)
    for dim, each in enumerate(by_dim):
        mask = mask & each.reshape([-1 if d == dim else 1 for d in range(len(by_dim))])
    return mask


def _offsets(local: Sequence[Any], sizes: Sequence[int], dims: Sequence[int]) -> Any:
    """Return the start of each box in the flattened dims."""
    offsets = np.array(0)
    for dim in dims:
        offsets = offsets * sizes[dim] + local[dim].reshape([-1 if d == dim else 1 for d in range(len(local))])
    return offsets


def _compressed(holds: Any, bounds: Sequence[Sequence[int]]) -> Holders:
    """Join neighbouring boxes that are on the same ranks all along a dim.

    Args:
        holds: booleans, ``[positions, boxes along dim 0, ...]``.
        bounds: for each dim the starts of its boxes, and its size.
    """
    empty = tuple(rank for rank in range(len(holds)) if not holds[rank].any())
    boxes: list[tuple[DimRange, ...]] = []
    for dim, edges in enumerate(bounds):
        lines = np.moveaxis(holds, dim + 1, 0)
        distinct = [i for i in range(len(lines)) if i == 0 or not np.array_equal(lines[i], lines[i - 1])]
        starts = [edges[i] for i in distinct]
        boxes.append(tuple(zip(starts, [*starts[1:], edges[-1]])))
        holds = np.take(holds, distinct, axis=dim + 1)
    flat = holds.reshape(len(holds), -1)
    holders = tuple(tuple(int(rank) for rank in np.flatnonzero(column)) for column in flat.T)
    return Holders(tuple(boxes), holders, empty)
