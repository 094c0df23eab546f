"""The steps of a redistribution and their prices. Each step changes the placement on one mesh axis.

The price of a step is the number of elements that a rank moves, padding included. The planner of redistributions adds
up the prices of its steps, and the rules of operations choose placements by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import chunk, cut_dim


@dataclass(frozen=True, slots=True)
class Step:
    """Base of the steps.

    Args:
        axis: the mesh axis whose placement changes.
        before: the placements on all axes before the step.
        after: the placements after it; they differ from ``before`` on ``axis`` only.
    """

    axis: int
    before: tuple[Placement, ...]
    after: tuple[Placement, ...]

    @property
    def source(self) -> Placement:
        """The placement before the step, on its axis."""
        return self.before[self.axis]

    @property
    def target(self) -> Placement:
        """The placement after the step, on its axis."""
        return self.after[self.axis]

    @property
    def op(self) -> str:
        """The reduction of the ``Partial`` that the step removes or adds.

        Raises:
            TypeError: neither placement is partial.
        """
        for placement in (self.source, self.target):
            if isinstance(placement, Partial):
                return placement.op
        raise TypeError(f"{self!r} has no reduction")


@dataclass(frozen=True, slots=True)
class AllReduce(Step):
    """Partial to Replicate."""


@dataclass(frozen=True, slots=True)
class AllGather(Step):
    """A shard of any kind to Replicate."""


@dataclass(frozen=True, slots=True)
class ReduceScatter(Step):
    """Partial to a shard of any kind."""


@dataclass(frozen=True, slots=True)
class AllToAll(Step):
    """One shard to another."""


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Replicate to a shard of any kind: no communication."""


@dataclass(frozen=True, slots=True)
class ToPartial(Step):
    """Replicate to Partial: no communication.

    The first rank of the axis keeps the value and the others have zeros (sum) or ones (product); for avg, min and max
    all keep it.
    """


# ---- prices ----
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
        return AllToAll if _first_dim(source) == _first_dim(target) and _same_range(source, target) else None
    return AllToAll


def _first_dim(placement: Placement) -> int:
    return (placement.dims or (0,))[0] if isinstance(placement, RaggedShard) else cut_dim(placement) or 0


def _same_range(source: Placement, target: Placement) -> bool:
    both_ragged = isinstance(source, RaggedShard) and isinstance(target, RaggedShard)
    return not both_ragged or source.dims == target.dims  # type: ignore[union-attr]


@lru_cache(maxsize=16384)
def _largest(size: int, shards: tuple[tuple[int, int], ...]) -> int:
    """Return the largest shard of a dim that is sharded by each (split factor, ranks) in turn."""
    for factor, n in shards:
        size = chunk(size // factor, n, 0)[1] * factor
    return size


def _largest_local(shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]) -> int:
    """Return the number of elements of the largest local tensor."""
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
    """Return the elements that a rank sends or receives in a step, whichever is more, on the busiest rank.

    With n ranks on the axis, ``w`` elements if the axis does not shard and ``p`` in the largest shard if it does:
    all-gather ``(n - 1) p``, since uneven shards are padded, or ``w`` if that is less; reduce-scatter ``(n - 1) p``;
    all-reduce ``2 (n - 1) ceil(w / n)``; all-to-all ``ceil((n - 1) p / n)`` with the larger shard of the two
    placements.
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
