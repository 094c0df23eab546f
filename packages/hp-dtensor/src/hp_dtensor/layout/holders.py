"""The ranks that have each part of a tensor.

Note [Boxes]
Along each dim the ranks' shards begin and end at a few edges. These divide the tensor into boxes whose elements are all
on the same ranks, so the cost depends on the number of boxes, not of elements. A ``RaggedShard`` is a range of several
flattened dims: if it ends inside a row, that row, and the element at which it ends, get edges of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hp_dtensor.layout.placements import Placement, RaggedShard
from hp_dtensor.layout.sharding import cut_dim, intervals, normalize, parts, ragged_of, run_view

Box = tuple[int, int]
"""The (start, stop) of a box along a dim."""


@dataclass(frozen=True)
class Holders:
    """The positions in a mesh that have each part of a tensor: Note [Boxes].

    Attributes:
        boxes: for each dim of the tensor the boxes along it, ascending.
        positions: for each box, in row-major order, the row-major positions in the mesh of the ranks that have it.
        empty: the positions without any element.
    """

    boxes: tuple[tuple[Box, ...], ...]
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
