"""Which elements a rank holds of each run of dims, as arrays of intervals: what two meshes have in common.

Note [Runs of dims]
    Two layouts are compared dim by dim, since a cut of a dim takes the same of it everywhere. Only a ``RaggedShard``
    cuts across its dims; these are one run, whose elements are numbered in the tensor's order. What a rank holds of a
    run ascends in that order, and its local tensor is the product of its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.sharding import cut_dim, intervals, parts, ragged_of

__all__ = ["Pieces", "Runs", "held", "merged", "overlap", "runs_of", "shared"]

Pieces = np.ndarray
"""[n, 2] of int64: (start, length), ascending, none empty."""
Runs = tuple[tuple[int, int], ...]
"""(first dim, dim after the last) of each run."""


def runs_of(shape: Sequence[int], *layouts: Sequence[Placement]) -> Runs:
    """Group the dims into ranges, as short as possible, such that no ``RaggedShard`` crosses from one to the next.

    ``runs_of((2, 3, 4), (RaggedShard((1, 2), (1, 1)),)) == ((0, 1), (1, 3))``
    """
    if not shape:
        return ((0, 0),)
    joined = {d for placements in layouts if (found := ragged_of(placements)) for d in found[1].dims[1:]}
    starts = [dim for dim in range(len(shape)) if dim not in joined]
    return tuple(zip(starts, [*starts[1:], len(shape)], strict=True))


def held(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    shape: Sequence[int],
    runs: Runs,
) -> tuple[Pieces, ...]:
    """Return the elements of each dim range on the rank at ``coordinate``; ``Partial`` counts as ``Replicate``.

    Args:
        placements: one for each mesh axis, dims positive.
        mesh_shape: ranks on each mesh axis.
        coordinate: the rank's index on each mesh axis.
        shape: the global shape.
        runs: from `runs_of`, for these placements among others.

    Raises:
        ValueError: if a placement doesn't fit.
    """
    cuts: dict[int | None, list[tuple[Placement, int, int]]] = {}
    for placement, n, index in zip(placements, mesh_shape, coordinate, strict=True):
        cuts.setdefault(cut_dim(placement), []).append((placement, n, index))
    by_dim = [_pieces(intervals(size, cuts.get(dim, []))) for dim, size in enumerate(shape)]
    ragged = ragged_of(placements)
    found = []
    for first, stop in runs:
        whole, dim = _pieces([(0, 1)]), first
        if ragged and first <= (ragged[1].dims or (0,))[0] < max(stop, 1):
            axis, placement = ragged
            start = placement.dims[0] if placement.dims else 0
            end = start + len(placement.dims)
            whole = _product(whole, by_dim[first:start], shape[first:start])
            inner = _product(_pieces([(0, 1)]), by_dim[start:end], shape[start:end])
            part = parts(placement, int(inner[:, 1].sum()), mesh_shape[axis])[coordinate[axis]]
            inner = _within(inner, *(part[0] if part else (0, 0)))
            whole, dim = _nested(whole, inner, prod(shape[start:end])), end
        found.append(_product(whole, by_dim[dim:stop], shape[dim:stop]))
    return tuple(found)


def overlap(mine: Pieces, theirs: Pieces) -> np.ndarray:
    """Return the common elements, [n, 3]: (offset in the concatenation of ``mine``, in that of ``theirs``, length)."""
    first = np.searchsorted(theirs.sum(1), mine[:, 0], "right")
    counts = np.searchsorted(theirs[:, 0], mine.sum(1), "left") - first
    i = np.repeat(np.arange(len(mine)), counts)
    j = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    low = np.maximum(mine[i, 0], theirs[j, 0])
    high = np.minimum(mine[i].sum(1), theirs[j].sum(1))
    return np.stack(
        [low - mine[i, 0] + _offsets(mine)[i], low - theirs[j, 0] + _offsets(theirs)[j], high - low], 1
    ).astype(np.int64)


def shared(mine: Sequence[Pieces], theirs: Sequence[Pieces]) -> np.ndarray:
    """[len(mine), len(theirs)]: how many elements each two have in common."""
    ours, others = sum(map(len, mine)), sum(map(len, theirs))
    if len(mine) * others < len(theirs) * ours:
        return shared(theirs, mine).T
    joined = np.concatenate([np.zeros((0, 2), np.int64), *mine])
    of = np.repeat(np.arange(len(mine)), [len(pieces) for pieces in mine])
    found = np.zeros((len(mine), len(theirs)), np.int64)
    for column, pieces in enumerate(theirs):
        counts = _below(pieces, joined.sum(1)) - _below(pieces, joined[:, 0])
        np.add.at(found[:, column], of, counts)
    return found


def _below(pieces: Pieces, numbers: np.ndarray) -> np.ndarray:
    """How many elements of ``pieces`` lie below each number."""
    if not len(pieces):
        return np.zeros_like(numbers)
    place = np.maximum(np.searchsorted(pieces[:, 0], numbers, "right") - 1, 0)
    return _offsets(pieces)[place] + np.clip(numbers - pieces[place, 0], 0, pieces[place, 1])


def merged(pieces: Pieces) -> Pieces:
    """Join adjacent intervals."""
    pieces = pieces[pieces[:, 1] > 0]
    begins = np.ones(len(pieces), bool)
    begins[1:] = pieces[:-1].sum(1) != pieces[1:, 0]
    starts = pieces[begins, 0]
    ends = pieces[np.roll(begins, -1)].sum(1)
    return np.stack([starts, ends - starts], 1)


def _pieces(found: Sequence[tuple[int, int]]) -> Pieces:
    made = np.array(found, np.int64).reshape(-1, 2)
    return made[made[:, 1] > 0]


def _offsets(pieces: Pieces) -> np.ndarray:
    return np.cumsum(pieces[:, 1]) - pieces[:, 1]


def _within(pieces: Pieces, start: int, length: int) -> Pieces:
    """Return the part ``[start, start + length)`` of the concatenation."""
    offsets = _offsets(pieces)
    low, high = np.maximum(offsets, start), np.minimum(offsets + pieces[:, 1], start + length)
    made = np.stack([pieces[:, 0] + low - offsets, high - low], 1)
    return made[made[:, 1] > 0]


def _product(outer: Pieces, inner: Sequence[Pieces], sizes: Sequence[int]) -> Pieces:
    for pieces, size in zip(inner, sizes, strict=True):
        outer = _nested(outer, pieces, size)
    return outer


def _nested(outer: Pieces, inner: Pieces, size: int) -> Pieces:
    """Return the elements ``i * size + j`` for ``i`` in ``outer`` and ``j`` in ``inner``, a part of ``[0, size)``."""
    if len(inner) == 1 and inner[0, 1] == size:
        return outer * size
    rows = np.repeat(outer[:, 0] - _offsets(outer), outer[:, 1]) + np.arange(outer[:, 1].sum())
    starts = (rows[:, None] * size + inner[None, :, 0]).reshape(-1)
    return merged(np.stack([starts, np.tile(inner[:, 1], len(rows))], 1))
