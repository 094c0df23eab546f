"""Strides of a global tensor, from those of a shard.

Note [Thin shards]
On a single device strides decide whether ``reshape`` or ``contiguous`` returns a view or a copy. All ranks must decide
alike, because a later write must reach the source on all of them or on none. A shard reveals the order of the dims in
memory if it has at least two indices of every dim that has two. If some rank has fewer, the tensor is *thin*: its
strides are those that its views recorded, on all ranks alike, and contiguous if none did. Results of operations count
as contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hp_dtensor.layout.placements import Placement, RaggedShard, Shard, StridedShard


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
