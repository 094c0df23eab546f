"""The price of moving a tensor between placements: bytes that travel, of the local and padded parts.

The planner of redistributions adds up the price of its steps, and the rules of operations choose placements by it.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import chunk, cut_dim
from hp_dtensor.redistribution.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, Step, ToPartial

__all__ = ["LOCAL", "step_cost", "step_type"]

Placements = tuple[Placement, ...]

LOCAL = (Slice, ToPartial)
"""Steps without communication."""


def step_type(source: Placement, target: Placement) -> type[Step] | None:
    """Return the step from one placement to another on one axis; None if it must go through Replicate."""
    if isinstance(source, Replicate):
        return ToPartial if isinstance(target, Partial) else Slice
    if isinstance(source, Partial):
        return AllReduce if isinstance(target, Replicate) else None if isinstance(target, Partial) else ReduceScatter
    if isinstance(target, Replicate):
        return AllGather
    if isinstance(target, Partial):
        return None
    if isinstance(source, RaggedShard) or isinstance(target, RaggedShard):
        return AllToAll if _run_start(source) == _run_start(target) and _same_run(source, target) else None
    return AllToAll


def _run_start(placement: Placement) -> int:
    return (placement.dims or (0,))[0] if isinstance(placement, RaggedShard) else cut_dim(placement) or 0


def _same_run(source: Placement, target: Placement) -> bool:
    both_ragged = isinstance(source, RaggedShard) and isinstance(target, RaggedShard)
    return not both_ragged or source.dims == target.dims  # type: ignore[union-attr]


@lru_cache(maxsize=16384)
def _largest(size: int, shards: tuple[tuple[int, int], ...]) -> int:
    """Return the largest shard of a dim that is sharded by each (split factor, ranks) in turn."""
    for factor, n in shards:
        size = chunk(size // factor, n, 0)[1] * factor
    return size


def _largest_local(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]) -> int:
    """Elements of the largest local tensor."""
    shards: dict[int, tuple[tuple[int, int], ...]] = {}
    ragged = (1, 1)
    for placement, n in zip(placements, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            shards[placement.dim] = (*shards.get(placement.dim, ()), (1, n))
        elif isinstance(placement, StridedShard):
            shards[placement.dim] = (*shards.get(placement.dim, ()), (placement.split_factor, n))
        elif isinstance(placement, RaggedShard):
            ragged = (max(placement.units), sum(placement.units) or 1)
    elements = prod(_largest(size, shards[dim]) if dim in shards else size for dim, size in enumerate(shape))
    return -(-elements * ragged[0] // ragged[1])


def step_cost(step: Step, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """Elements that a rank sends or receives in a step, whichever is more, for the rank where that is the most.

    With n ranks on the axis, ``w`` elements without a cut on it and ``p`` in the largest piece with it: all-gather
    ``(n - 1) p``, as uneven pieces are padded, or ``w`` where that is less; reduce-scatter ``(n - 1) p``; all-reduce
    ``2 (n - 1) ceil(w / n)``; all-to-all ``ceil((n - 1) p / n)`` with the larger piece of the two placements.
    """
    n = mesh_shape[step.axis]
    if isinstance(step, LOCAL) or n == 1:
        return 0
    before = _largest_local(shape, step.before, mesh_shape)
    if isinstance(step, AllReduce):
        return 2 * (n - 1) * -(-before // n)
    after = _largest_local(shape, step.after, mesh_shape)
    if isinstance(step, AllGather):
        return min((n - 1) * before, after)
    if isinstance(step, ReduceScatter):
        return (n - 1) * after
    return -(-(n - 1) * max(before, after) // n)
