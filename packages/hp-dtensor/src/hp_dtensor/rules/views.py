"""Views: the placements of a tensor after a change of shape that keeps the order of its elements.

The dims before a sharded dim form ``outer`` blocks, each of which has its ``size`` indices sharded over the axis. In
the new shape the same blocks are either a complete dim (Shard) or part of one (StridedShard).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hp_dtensor.layout.placements import Placement, RaggedShard, Replicate, Shard, StridedShard


def view_placements(
    shape: Sequence[int], result: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    """Return the placements that the operand of a view must have, and those of the result.

    Example:
        >>> view_placements((4, 6), (4, 3, 2), (Shard(1),), (3,))
        ((Shard(1),), (Shard(1),))
        >>> view_placements((2, 6, 5), (12, 5), (Shard(1),), (3,))
        ((Shard(1),), (StridedShard(dim=0, split_factor=2),))
        >>> view_placements((4, 6), (4, 2, 3), (Shard(1),), (3,))   # neither new dim contains whole shards
        ((Replicate(),), (Replicate(),))

    Returns:
        The operand's placements (``Replicate`` where a shard does not survive the view) and the result's.
    """
    operand: list[Placement] = []
    out: list[Placement] = []
    shards: dict[Placement, int] = {}
    for placement, ranks in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            shards[placement] = shards.get(placement, 1) * ranks
    cut_dims = [p.dim for p in shards if isinstance(p, (Shard, StridedShard))]
    moved: dict[Placement, Placement | None] = {}
    for placement, count in shards.items():
        assert isinstance(placement, (Shard, StridedShard))
        alone = cut_dims.count(placement.dim) == 1
        moved[placement] = _move(shape, result, placement, count) if alone else None
        if not alone and tuple(shape) == tuple(result):
            moved[placement] = placement
    result_dims = [p.dim for p in moved.values() if isinstance(p, (Shard, StridedShard))]
    for placement in placements:
        if isinstance(placement, (Shard, StridedShard)):
            target = moved[placement]
            if isinstance(target, (Shard, StridedShard)) and result_dims.count(target.dim) > 1 and target != placement:
                target = None  # two axes would shard one dim of the result
            operand.append(placement if target is not None else Replicate())
            out.append(target if target is not None else Replicate())
        elif isinstance(placement, RaggedShard):  # ranges of all elements in order are the same in any shape
            covers_all = placement.dims == tuple(range(len(shape))) and len(result) > 0
            operand.append(placement if covers_all else Replicate())
            out.append(replace(placement, dims=tuple(range(len(result)))) if covers_all else Replicate())
        else:
            operand.append(placement)
            out.append(placement)
    return tuple(operand), tuple(out)


def _move(
    shape: Sequence[int], result: Sequence[int], placement: Shard | StridedShard, shards: int
) -> Placement | None:
    outer = math.prod(shape[: placement.dim])
    size = shape[placement.dim]
    if isinstance(placement, StridedShard):
        outer *= placement.split_factor
        size //= placement.split_factor
    if size == 0 or math.prod(shape) == 0:
        return None
    if size == 1 and isinstance(placement, Shard):  # one rank has the only index, wherever the dim goes
        ones = [d for d, length in enumerate(result) if length == 1 and math.prod(result[:d]) == outer]
        return Shard(ones[0]) if ones else None
    before = 1
    for dim, length in enumerate(result):
        if before <= outer < before * length and outer % before == 0:
            split = outer // before
            if length % split:
                return None
            block = length // split
            same = block == size and math.prod(result[dim + 1 :]) == math.prod(shape[placement.dim + 1 :])
            if not same and (size % shards or block % shards):
                return None
            if split == 1:
                return Shard(dim)
            return StridedShard(dim, split) if block % shards == 0 else None
        before *= length
    return None
