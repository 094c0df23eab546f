"""The elements of each group of dims on a rank, as arrays of ranges, and the elements that two ranks share.

Note [Groups of dims]
    Two layouts are compared dim by dim, since a shard of a dim has the same indices of it everywhere. Only a
    ``RaggedShard`` shards across several dims. These form one group, whose elements are numbered in the tensor's order.
    A rank's elements of a group ascend in that order, and its local tensor is the product over its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hp_dtensor.layout.placements import Placement
from hp_dtensor.layout.sharding import cut_dim, intervals, parts, ragged_of

Ranges = np.ndarray
"""[n, 2] of int64: (start, length), ascending, none empty."""
DimGroups = tuple[tuple[int, int], ...]
"""(first dim, dim after the last) of each group."""


def dim_groups(shape: Sequence[int], *layouts: Sequence[Placement]) -> DimGroups:
    """Group the dims, into as many groups as possible, so that no ``RaggedShard`` crosses from one to the next.

    ``dim_groups((2, 3, 4), (RaggedShard((1, 2), (1, 1)),)) == ((0, 1), (1, 3))``
    """
    if not shape:
        return ((0, 0),)
    joined = {d for placements in layouts if (ragged := ragged_of(placements)) for d in ragged[1].dims[1:]}
    starts = [dim for dim in range(len(shape)) if dim not in joined]
    return tuple(zip(starts, [*starts[1:], len(shape)], strict=True))


def local_ranges(
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    shape: Sequence[int],
    groups: DimGroups,
) -> tuple[Ranges, ...]:
    """Return the elements of each group of dims on the rank at ``coordinate``; ``Partial`` counts as ``Replicate``.

    Args:
        placements: one for each mesh axis, dims positive.
        mesh_shape: ranks on each mesh axis.
        coordinate: the rank's index on each mesh axis.
        shape: the global shape.
        groups: from `dim_groups`, for these placements among others.

    Raises:
        ValueError: a placement doesn't fit the shape.
    """
    shards: dict[int | None, list[tuple[Placement, int, int]]] = {}
    for placement, n, index in zip(placements, mesh_shape, coordinate, strict=True):
        shards.setdefault(cut_dim(placement), []).append((placement, n, index))
    by_dim = [_ranges(intervals(size, shards.get(dim, []))) for dim, size in enumerate(shape)]
    ragged = ragged_of(placements)
    result = []
    for first, stop in groups:
        elements, dim = _ranges([(0, 1)]), first
        if ragged and first <= (ragged[1].dims or (0,))[0] < max(stop, 1):
            axis, placement = ragged
            start = placement.dims[0] if placement.dims else 0
            end = start + len(placement.dims)
            elements = _product(elements, by_dim[first:start], shape[first:start])
            inner = _product(_ranges([(0, 1)]), by_dim[start:end], shape[start:end])
            part = parts(placement, int(inner[:, 1].sum()), mesh_shape[axis])[coordinate[axis]]
            inner = joined_ranges(np.concatenate([_within(inner, *each) for each in part or [(0, 0)]]))
            elements, dim = _nested(elements, inner, prod(shape[start:end])), end
        result.append(_product(elements, by_dim[dim:stop], shape[dim:stop]))
    return tuple(result)


def common_elements(first: Ranges, second: Ranges) -> np.ndarray:
    """Return the common elements, [n, 3]: (offset in the concatenation of ``first``, in that of ``second``, length)."""
    begin = np.searchsorted(second.sum(1), first[:, 0], "right")
    counts = np.searchsorted(second[:, 0], first.sum(1), "left") - begin
    i = np.repeat(np.arange(len(first)), counts)
    j = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    low = np.maximum(first[i, 0], second[j, 0])
    high = np.minimum(first[i].sum(1), second[j].sum(1))
    return np.stack(
        [low - first[i, 0] + _offsets(first)[i], low - second[j, 0] + _offsets(second)[j], high - low], 1
    ).astype(np.int64)


def count_common(first: Sequence[Ranges], second: Sequence[Ranges]) -> np.ndarray:
    """Return the number of elements that each two have in common, [len(first), len(second)]."""
    ours, others = sum(map(len, first)), sum(map(len, second))
    if len(first) * others < len(second) * ours:
        return count_common(second, first).T
    joined = np.concatenate([np.zeros((0, 2), np.int64), *first])
    of = np.repeat(np.arange(len(first)), [len(ranges) for ranges in first])
    result = np.zeros((len(first), len(second)), np.int64)
    for column, ranges in enumerate(second):
        counts = _below(ranges, joined.sum(1)) - _below(ranges, joined[:, 0])
        np.add.at(result[:, column], of, counts)
    return result


def _below(ranges: Ranges, numbers: np.ndarray) -> np.ndarray:
    """Return the number of elements of ``ranges`` below each of ``numbers``."""
    if not len(ranges):
        return np.zeros_like(numbers)
    index = np.maximum(np.searchsorted(ranges[:, 0], numbers, "right") - 1, 0)
    return _offsets(ranges)[index] + np.clip(numbers - ranges[index, 0], 0, ranges[index, 1])


def joined_ranges(ranges: Ranges) -> Ranges:
    """Join adjacent ranges, and drop empty ones."""
    ranges = ranges[ranges[:, 1] > 0]
    begins = np.ones(len(ranges), bool)
    begins[1:] = ranges[:-1].sum(1) != ranges[1:, 0]
    starts = ranges[begins, 0]
    ends = ranges[np.roll(begins, -1)].sum(1)
    return np.stack([starts, ends - starts], 1)


def _ranges(intervals: Sequence[tuple[int, int]]) -> Ranges:
    ranges = np.array(intervals, np.int64).reshape(-1, 2)
    return ranges[ranges[:, 1] > 0]


def _offsets(ranges: Ranges) -> np.ndarray:
    return np.cumsum(ranges[:, 1]) - ranges[:, 1]


def _within(ranges: Ranges, start: int, length: int) -> Ranges:
    """Return the part ``[start, start + length)`` of the concatenation."""
    offsets = _offsets(ranges)
    low, high = np.maximum(offsets, start), np.minimum(offsets + ranges[:, 1], start + length)
    result = np.stack([ranges[:, 0] + low - offsets, high - low], 1)
    return result[result[:, 1] > 0]


def _product(outer: Ranges, inner: Sequence[Ranges], sizes: Sequence[int]) -> Ranges:
    for ranges, size in zip(inner, sizes, strict=True):
        outer = _nested(outer, ranges, size)
    return outer


def _nested(outer: Ranges, inner: Ranges, size: int) -> Ranges:
    """Return the elements ``i * size + j`` for ``i`` in ``outer`` and ``j`` in ``inner``, a part of ``[0, size)``."""
    if len(inner) == 1 and inner[0, 1] == size:
        return outer * size
    rows = np.repeat(outer[:, 0] - _offsets(outer), outer[:, 1]) + np.arange(outer[:, 1].sum())
    starts = (rows[:, None] * size + inner[None, :, 0]).reshape(-1)
    return joined_ranges(np.stack([starts, np.tile(inner[:, 1], len(rows))], 1))
