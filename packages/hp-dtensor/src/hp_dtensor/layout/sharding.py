"""The shard of a tensor on each rank, and its strides: arithmetic on shapes, placements and mesh coordinates.

Placements apply from the left mesh axis to the right one: each shards what the axes before it leave. A ``RaggedShard``
applies after all others, whichever its axis, because it flattens dims that they may shard.

Note [One range of elements]
    A placement shards one *range*: a tensor dim, or the named dims of a ``RaggedShard``, flattened. With the dims
    before and after it, a tensor is ``[outer, range, inner]``. Each rank has some intervals of the range, and its local
    tensor is their concatenation. All data movement in `redistribution` is expressed by these sizes and intervals.

Note [Thin shards]
On a single device strides decide whether ``reshape`` or ``contiguous`` returns a view or a copy. All ranks must decide
alike, because a later write must reach the source on all of them or on none. A shard reveals the order of the dims in
memory if it has at least two indices of every dim that has two. If some rank has fewer, the tensor is *thin*: its
strides are those that its views recorded, on all ranks alike, and contiguous if none did. Results of operations count
as contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

Interval = tuple[int, int]
"""(start, length)"""


def chunk(size: int, n: int, index: int) -> Interval:
    """Return start and length of chunk ``index`` of ``n`` as in ``torch.chunk``: ``ceil(size / n)``, the last less.

    ``chunk(5, 4, 2) == (4, 1)`` and ``chunk(5, 4, 3) == (5, 0)``.
    """
    length = -(-size // n)
    start = min(index * length, size)
    return start, min(length, size - start)


def cut_dim(placement: Placement) -> int | None:
    """Return the tensor dim that a ``Shard`` or ``StridedShard`` shards, None for other placements."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def parts(placement: Placement, size: int, n: int) -> tuple[tuple[Interval, ...], ...]:
    """Return the intervals of a range of ``size`` elements on each of ``n`` ranks, in local order, without empty ones.

    - ``Shard``: chunk ``i``.
    - ``StridedShard(dim, split_factor=f)``: chunk ``i`` of each of ``f`` blocks of ``size / f``: of
      ``parts(StridedShard(0, 2), 8, 2)``, rank 0 has elements 0, 1, 4, 5.
    - ``RaggedShard``: one interval of ``size * units[i] / sum(units)``, or with ``owners`` the blocks of rank ``i``.

    Raises:
        ValueError: if ``split_factor`` doesn't divide ``size``, or ``size`` is not a multiple of the sum of ``units``.
    """
    return _parts(placement, size, n)


@lru_cache(maxsize=4096)
def _parts(placement: Placement, size: int, n: int) -> tuple[tuple[Interval, ...], ...]:
    if isinstance(placement, RaggedShard):
        total = sum(placement.units)
        if not ragged_fits(placement, size):
            raise ValueError(
                f"{placement!r} does not fit: the named dims have {size} elements here, which must be a multiple of "
                f"sum(units) = {total}. Pass units whose sum divides the number of elements"
            )
        if placement.owners:
            block = size // total
            blocks = [(owner, (index * block, block)) for index, owner in enumerate(placement.owners)]
            return tuple(tuple(_merge([each for owner, each in blocks if owner == rank])) for rank in range(n))
        chunks: list[Interval] = []
        start = 0
        for unit in placement.units:
            length = size * unit // total if total else 0
            chunks.append((start, length))
            start += length
        by_rank = [[interval] for interval in chunks]
    elif isinstance(placement, StridedShard):
        if size % placement.split_factor:
            raise ValueError(
                f"{placement!r} does not fit: split_factor {placement.split_factor} must divide the size {size} "
                f"that is left of dim {placement.dim}"
            )
        block = size // placement.split_factor
        by_rank = [
            [(b * block + start, length) for b in range(placement.split_factor)]
            for start, length in (chunk(block, n, i) for i in range(n))
        ]
    elif isinstance(placement, Shard):
        by_rank = [[chunk(size, n, i)] for i in range(n)]
    else:
        by_rank = [[(0, size)]] * n
    return tuple(tuple(_merge(each)) for each in by_rank)


def ragged_fits(placement: RaggedShard, size: int) -> bool:
    """Tell whether ``size`` elements can be divided in proportion to the units."""
    total = sum(placement.units)
    return size % total == 0 if total else size == 0


def _merge(intervals_: Sequence[Interval]) -> list[Interval]:
    """Drop empty intervals, join those that touch."""
    merged: list[Interval] = []
    for start, length in intervals_:
        if not length:
            continue
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def intervals(size: int, shards: Sequence[tuple[Placement, int, int]]) -> list[Interval]:
    """Return the intervals of a dim on one rank, in local order.

    Args:
        size: the global size of the dim.
        shards: (placement, ranks of its axis, index on it) for each axis that shards this dim, the left mesh axis
            first. Each shards what the one before leaves.
    """
    local = [(0, size)]
    for placement, n, index in shards:
        remaining = sum(length for _, length in local)
        local = _merge(
            [interval for part in parts(placement, remaining, n)[index] for interval in _within(local, *part)]
        )
    return local


def _within(local: Sequence[Interval], start: int, length: int) -> list[Interval]:
    """Return the part ``[start, start + length)`` of the concatenation of ``local``."""
    overlaps: list[Interval] = []
    offset = 0
    for held_start, held_length in local:
        low, high = max(start, offset), min(start + length, offset + held_length)
        if low < high:
            overlaps.append((held_start + low - offset, high - low))
        offset += held_length
    return overlaps


def normalize(
    placements: Sequence[Placement], shape: Sequence[int], mesh_shape: Sequence[int]
) -> tuple[Placement, ...]:
    """Check placements against a tensor's and a mesh's shape; negative dims become positive.

    Whether ``split_factor`` and ``units`` divide the sizes on a rank is checked when that rank's shard is computed.

    Raises:
        ValueError: a different number of placements than mesh axes, a dim out of range, a wrong number of ``units``,
            ``RaggedShard`` dims that are not consecutive, or two ``RaggedShard`` placements.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {len(mesh_shape)} axes "
            f"{tuple(mesh_shape)}: pass one placement per mesh axis"
        )
    normalized = tuple(_normalize_one(p, axis, shape, mesh_shape) for axis, p in enumerate(placements))
    if sum(isinstance(p, RaggedShard) for p in normalized) > 1:
        raise ValueError(
            f"placements {normalized} have more than one RaggedShard: a tensor can be ragged on one mesh axis only"
        )
    return normalized


def _normalize_one(placement: Placement, axis: int, shape: Sequence[int], mesh_shape: Sequence[int]) -> Placement:
    if isinstance(placement, Shard):
        dim = _dim(placement.dim, placement, shape)
        return placement if dim == placement.dim else Shard(dim)
    if isinstance(placement, StridedShard):
        if placement.split_factor < 1:
            raise ValueError(f"{placement!r}: split_factor must be at least 1, got {placement.split_factor}")
        dim = _dim(placement.dim, placement, shape)
        return placement if dim == placement.dim else StridedShard(dim, placement.split_factor)
    if isinstance(placement, RaggedShard):
        dims = tuple(_dim(dim, placement, shape) for dim in placement.dims)
        if not dims and shape or dims != tuple(range(min(dims, default=0), min(dims, default=0) + len(dims))):
            raise ValueError(f"{placement!r}: dims must be consecutive and ascending, as (0, 1), got {placement.dims}")
        if len(placement.units) != mesh_shape[axis] or min(placement.units, default=0) < 0:
            raise ValueError(
                f"{placement!r} on mesh axis {axis} of size {mesh_shape[axis]}: pass {mesh_shape[axis]} "
                f"non-negative units, got {len(placement.units)}: {placement.units}"
            )
        if placement.owners and tuple(map(placement.owners.count, range(mesh_shape[axis]))) != placement.units:
            raise ValueError(
                f"{placement!r}: owners must list each rank as often as its unit says, got"
                f" {tuple(map(placement.owners.count, range(mesh_shape[axis])))} times the ranks from 0"
            )
        return placement if dims == placement.dims else replace(placement, dims=dims)
    return placement


def _dim(dim: int, placement: Placement, shape: Sequence[int]) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{placement!r}: dim {dim} is out of range for a tensor of shape {tuple(shape)}, "
            f"which has {len(shape)} dims: use {-len(shape)} to {len(shape) - 1}"
            if shape
            else f"{placement!r}: dim {dim} is out of range for a tensor of shape (): a scalar cannot be sharded"
        )
    return dim % len(shape)


def ragged_of(placements: Sequence[Placement]) -> tuple[int, RaggedShard] | None:
    """Return axis and placement of the ``RaggedShard``, None if there is none."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            return axis, placement
    return None


def local_shape(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the local tensor of the rank at ``coordinate``.

    ``local_shape((5, 6), (Shard(0), Shard(1)), (2, 3), (1, 2)) == (2, 2)``

    Args:
        shape: the global shape.
        placements: one for each mesh axis.
        mesh_shape: ranks on each mesh axis.
        coordinate: this rank's index on each mesh axis.

    Raises:
        ValueError: if a placement doesn't fit the shape.
    """
    placements = normalize(placements, shape, mesh_shape)
    sizes = list(shape)
    for placement, n, index in zip(placements, mesh_shape, coordinate, strict=True):
        dim = cut_dim(placement)
        if dim is not None:
            if isinstance(placement, Shard):
                sizes[dim] = chunk(sizes[dim], n, index)[1]
            else:
                sizes[dim] = sum(length for _, length in parts(placement, sizes[dim], n)[index])
    ragged = ragged_of(placements)
    if ragged:
        axis, placement = ragged
        outer, elements, _ = run_view(placement, (), sizes)
        flat = sum(length for _, length in parts(placement, elements, mesh_shape[axis])[coordinate[axis]])
        first = placement.dims[0] if placement.dims else 0
        sizes[first : first + len(placement.dims)] = [flat]
    return tuple(sizes)


def run_view(placement: Placement, others: Sequence[Placement], local: Sequence[int]) -> tuple[int, int, int]:
    """Return the (outer, range, inner) sizes of a local shape for ``placement``: Note [One range of elements].

    Args:
        placement: a ``Shard``, ``StridedShard`` or ``RaggedShard``.
        others: the placements of the other axes; a ``RaggedShard`` among them has flattened its dims in ``local``.
        local: the local shape before ``placement`` applies.
    """
    dims = placement.dims if isinstance(placement, RaggedShard) else (cut_dim(placement),)
    first, count = (dims[0] or 0, len(dims)) if dims else (0, 0)
    ragged = ragged_of(others)
    if ragged and ragged[1].dims and first > ragged[1].dims[-1]:
        first -= len(ragged[1].dims) - 1
    return prod(local[:first]), prod(local[first : first + count]), prod(local[first + count :])


def take(array: Any, placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Any:
    """Return the shard of a global numpy array on the rank at ``coordinate``; ``Partial`` counts as ``Replicate``."""
    import numpy as np

    placements = normalize(placements, array.shape, mesh_shape)
    for dim, size in enumerate(array.shape):
        shards = [(p, n, i) for p, n, i in zip(placements, mesh_shape, coordinate, strict=True) if cut_dim(p) == dim]
        if shards:
            local = intervals(size, shards)
            indices = np.concatenate([np.arange(s, s + n) for s, n in local] or [np.arange(0)])
            array = np.take(array, indices, axis=dim)
    ragged = ragged_of(placements)
    if ragged:
        axis, placement = ragged
        outer, elements, inner = run_view(placement, (), array.shape)
        local = parts(placement, elements, mesh_shape[axis])[coordinate[axis]]
        flat, pieces = array.reshape(outer, elements, inner), local or [(0, 0)]
        shape = local_shape(array.shape, _only(placement, axis, len(mesh_shape)), mesh_shape, coordinate)
        array = np.concatenate([flat[:, start : start + length] for start, length in pieces], 1).reshape(shape)
    return array


def _only(placement: Placement, axis: int, ndim: int) -> tuple[Placement, ...]:
    return tuple(placement if a == axis else Replicate() for a in range(ndim))


def assemble(
    locals_: Mapping[tuple[int, ...], Any],
    placements: Sequence[Placement],
    shape: Sequence[int],
    mesh_shape: Sequence[int],
) -> Any:
    """Return the global numpy array whose shards are ``locals_``: the inverse of `take`.

    Args:
        locals_: the local array of each mesh coordinate. Of ranks with the same shard the first one's is used.
        placements: one for each mesh axis; no ``Partial``.
        shape: the global shape.
        mesh_shape: ranks on each mesh axis.

    Raises:
        ValueError: for a ``Partial`` placement.
    """
    import numpy as np

    if any(isinstance(p, Partial) for p in placements):
        raise ValueError(f"assemble: {tuple(placements)} has a Partial: reduce it first (redistribution.simulate does)")
    size = prod(shape)
    index = np.arange(size).reshape(tuple(shape))
    any_local = next(iter(locals_.values()))
    flat = np.empty(size, dtype=any_local.dtype)
    for coordinate in reversed(list(locals_)):
        flat[take(index, placements, mesh_shape, coordinate).reshape(-1)] = locals_[coordinate].reshape(-1)
    return flat.reshape(tuple(shape))


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor as torch counts them: ``contiguous((2, 3, 4)) == (12, 4, 1)``."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def global_strides(strides: Sequence[int], part: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of the global tensor: each grows with the dims inside it.

    ``global_strides((3, 1), (2, 3), (4, 6)) == (6, 1)``

    Args:
        strides: the strides of a shard.
        part: the shard's shape.
        shape: the global shape; a size that differs from the shard's is above 1, and the shard's is not 0.
    """
    result, global_elements, local_elements = [0] * len(shape), 1, 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        result[dim] = strides[dim] * global_elements // local_elements
        if part[dim] != shape[dim]:
            global_elements, local_elements = global_elements * shape[dim], local_elements * part[dim]
    return tuple(result)


def is_thin(shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> bool:
    """Return True if shards don't reveal the strides: ragged, or some rank has fewer than two indices of a longer dim.

    Args:
        shape: the global shape.
        placements: one for each mesh axis.
        mesh_shape: ranks on each mesh axis.
    """
    sizes: dict[int, set[int]] = {}
    for placement, ranks in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, RaggedShard):
            return True
        if isinstance(placement, (Shard, StridedShard)):
            blocks = placement.split_factor if isinstance(placement, StridedShard) else 1
            dim = placement.dim
            lengths_by_size = [_chunks(size // blocks, ranks) for size in sizes.get(dim, {shape[dim]})]
            sizes[dim] = {blocks * length for lengths in lengths_by_size for length in lengths}
    return any(min(lengths) < min(shape[dim], 2) for dim, lengths in sizes.items())


def _chunks(size: int, ranks: int) -> set[int]:
    """Return the longest and shortest length of the chunks of ``ceil(size / ranks)`` indices that make up ``size``."""
    length = -(-size // ranks)
    return {length, max(size - length * (ranks - 1), 0)}
