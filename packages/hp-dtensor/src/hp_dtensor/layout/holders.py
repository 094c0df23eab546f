"""Which ranks hold which part of a tensor.

Note [Boxes]
Along each dim the ranks' parts begin and end at a few places only. These cut the tensor in boxes, and within a box each
element is held by the same ranks, so that one element of a box stands for all: a tensor of a billion elements costs
what one of its boxes' number does. A ``RaggedShard`` cuts a run of several dims: where a piece ends inside a row, that
row, and that element of it, get places of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from hp_dtensor.layout.placements import Placement, RaggedShard
from hp_dtensor.layout.sharding import cut_dim, intervals, normalize, parts, ragged_of, run_view

__all__ = ["Box", "Grid", "Holders", "who_holds"]

Box = tuple[int, int]
"""Where a box begins and ends along a dim."""


@dataclass(frozen=True)
class Holders:
    """Which places of a mesh hold which part of a tensor, see Note [Boxes].

    Attributes:
        boxes: for each dim of the tensor the boxes along it, ascending.
        held: for each box, in row-major order, the row-major places in the mesh of the ranks that hold it.
        empty: the places that hold no element.
    """

    boxes: tuple[tuple[Box, ...], ...]
    held: tuple[tuple[int, ...], ...]
    empty: tuple[int, ...]

    def grids(self) -> Iterator[Grid]:
        """Yield grids of boxes along the last two sharded dims, one grid for each box along the others."""
        ndim = len(self.boxes)
        by_need = sorted(range(ndim), key=lambda dim: (len(self.boxes[dim]) > 1, dim))
        shown = sorted(by_need[-2:])
        others = [dim for dim in range(ndim) if dim not in shown]
        at = np.arange(len(self.held)).reshape([len(boxes) for boxes in self.boxes])
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
        cells: an array with a dim for each of ``dims``, of one element where there is none: the box's index in
            ``Holders.held``.
    """

    fixed: tuple[tuple[int, Box], ...]
    dims: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    cells: Any

    def label(self, shape: Sequence[int]) -> str:
        """Return the part of a tensor of this shape as an index, ``[0:4, :, :]``; empty for the complete tensor."""
        index = [":"] * len(shape)
        for dim, (start, stop) in self.fixed:
            if stop - start < shape[dim]:
                index[dim] = f"{start}:{stop}"
        return "" if set(index) <= {":"} else f"[{', '.join(index)}]"


def who_holds(shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> Holders:
    """Which places of a mesh hold which part of a tensor.

    ``who_holds((5,), (Shard(0),), (2,))`` has boxes (0, 3) and (3, 5) along dim 0, held by place 0 and by place 1.

    Args:
        shape: the global shape.
        placements: one for each mesh axis. A rank holds all of what it has a ``Partial`` of.
        mesh_shape: ranks on each mesh axis.

    Raises:
        ValueError: a placement doesn't fit the shape.
    """
    placements = normalize(placements, shape, mesh_shape)
    coordinates = list(np.ndindex(*mesh_shape))
    dims = [[_held(dim, size, placements, mesh_shape, c) for c in coordinates] for dim, size in enumerate(shape)]
    edges = [{0, size, *(s for held in each for s in held[0] + held[1])} for size, each in zip(shape, dims)]
    ragged = ragged_of(placements)
    ranges: list[tuple[int, int]] = []
    if ragged:
        for rank, coordinate in enumerate(coordinates):
            by_dim = [each[rank] for each in dims]
            ranges.append(_run(ragged[1], by_dim, mesh_shape[ragged[0]], coordinate[ragged[0]]))
            for edge in ranges[-1]:
                _add_places(edges, ragged[1], by_dim, edge)
    bounds = [sorted(each) for each in edges]
    at = [np.array(each[:-1], dtype=np.int64) for each in bounds]
    holds = np.zeros((len(coordinates), *(len(each) for each in at)), dtype=bool)
    for rank in range(len(coordinates)):
        local = [_positions(each[rank], at[dim]) for dim, each in enumerate(dims)]
        holds[rank] = _mask([each >= 0 for each in local])
        if ragged:
            sizes = [sum(n for n in each[rank][2]) for each in dims]
            offset = _offsets(local, sizes, ragged[1].dims)
            holds[rank] &= (ranges[rank][0] <= offset) & (offset < ranges[rank][1])
    return _compressed(holds, bounds)


Held = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Starts, ends and lengths of what a rank holds of a dim, in local order."""


def _held(dim: int, size: int, placements: Sequence[Placement], mesh: Sequence[int], at: Sequence[int]) -> Held:
    """Return the intervals of a dim on the rank at ``coordinate``, ignoring any ``RaggedShard``."""
    shards = [(p, n, i) for p, n, i in zip(placements, mesh, at, strict=True) if cut_dim(p) == dim]
    local = intervals(size, shards)
    return tuple(s for s, _ in local), tuple(s + n for s, n in local), tuple(n for _, n in local)


def _run(placement: RaggedShard, dims: Sequence[Held], n: int, index: int) -> tuple[int, int]:
    """Start and end of a rank's piece in the run of the ragged dims."""
    _, size, _ = run_view(placement, (), [sum(each[2]) for each in dims])
    range_ = parts(placement, size, n)[index]
    return (range_[0][0], range_[0][0] + range_[0][1]) if range_ else (0, 0)


def _add_places(edges: Sequence[set[int]], placement: RaggedShard, dims: Sequence[Held], edge: int) -> None:
    """Cut each ragged dim around the element at which a piece of the run begins or has ended."""
    sizes = [sum(dims[dim][2]) for dim in placement.dims]
    if not 0 < edge < prod(sizes):
        return
    for dim, local in zip(placement.dims, np.unravel_index(edge, sizes), strict=True):
        for start, length in zip(dims[dim][0], dims[dim][2], strict=True):
            if local < length:
                edges[dim].update((start + int(local), start + int(local) + 1))
                break
            local -= length


def _positions(intervals_: Held, at: Any) -> Any:
    """Return the local index of each global index, -1 for those that are not on the rank."""
    positions = np.full(len(at), -1, dtype=np.int64)
    offset = 0
    for start, stop, length in zip(*intervals_, strict=True):
        inside = (at >= start) & (at < stop)
        positions[inside] = at[inside] - start + offset
        offset += length
    return positions


def _mask(by_dim: Sequence[Any]) -> Any:
    """Return an array that is True for the boxes that the rank has along every dim."""
    mask = np.array(True)
    for dim, each in enumerate(by_dim):
        mask = mask & each.reshape([-1 if d == dim else 1 for d in range(len(by_dim))])
    return mask


def _offsets(local: Sequence[Any], sizes: Sequence[int], dims: Sequence[int]) -> Any:
    """Where each box begins in the run of some dims."""
    offsets = np.array(0)
    for dim in dims:
        offsets = offsets * sizes[dim] + local[dim].reshape([-1 if d == dim else 1 for d in range(len(local))])
    return offsets


def _compressed(holds: Any, bounds: Sequence[Sequence[int]]) -> Holders:
    """Join boxes that all along a dim are held by the same ranks as their neighbours.

    Args:
        holds: of booleans, ``[places, boxes along dim 0, ...]``.
        bounds: for each dim where its boxes begin, and its size.
    """
    empty = tuple(rank for rank in range(len(holds)) if not holds[rank].any())
    boxes: list[tuple[Box, ...]] = []
    for dim, edges in enumerate(bounds):
        lines = np.moveaxis(holds, dim + 1, 0)
        distinct = [i for i in range(len(lines)) if i == 0 or not np.array_equal(lines[i], lines[i - 1])]
        starts = [edges[i] for i in distinct]
        boxes.append(tuple(zip(starts, [*starts[1:], edges[-1]])))
        holds = np.take(holds, distinct, axis=dim + 1)
    flat = holds.reshape(len(holds), -1)
    holders = tuple(tuple(int(rank) for rank in np.flatnonzero(column)) for column in flat.T)
    return Holders(tuple(boxes), holders, empty)
