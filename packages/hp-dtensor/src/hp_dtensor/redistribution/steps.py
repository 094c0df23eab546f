"""The steps of a redistribution, their prices, and each as one rank sees it: sizes and intervals.

The price of a step is the number of elements that a rank moves, padding included. The planner of redistributions adds
up the prices of its steps, and the rules of operations choose placements by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import Interval, chunk, cut_dim, local_shape, parts, run_view


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


@dataclass(frozen=True, slots=True)
class Place:
    """A step seen from one rank: shapes local to the other axes, and this rank's index among the axis's ``n``.

    Ranks are numbered as in their process group, whose collectives lay out pieces in that order. ``order`` tells the
    place along the axis of each of them where that is another: where a mesh's ranks do not ascend.
    """

    n: int
    me: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    whole: tuple[int, ...]
    bare: tuple[Placement, ...]
    order: tuple[int, ...] | None = None

    @staticmethod
    def of(
        step: Step,
        shape: tuple[int, ...],
        mesh_shape: tuple[int, ...],
        coordinate: Sequence[int],
        order: tuple[int, ...] | None = None,
    ) -> Place:
        bare = (*step.before[: step.axis], Replicate(), *step.before[step.axis + 1 :])
        before, after, whole = (
            local_shape(shape, placements, mesh_shape, coordinate) for placements in (step.before, step.after, bare)
        )
        at = coordinate[step.axis]
        me = order.index(at) if order is not None else at
        return Place(mesh_shape[step.axis], me, before, after, whole, bare, order)

    @property
    def first(self) -> bool:
        """Tell whether this rank is the first along the axis."""
        return (self.me if self.order is None else self.order[self.me]) == 0


@dataclass(frozen=True, slots=True)
class Cut:
    """How a placement cuts the whole tensor: Note [One range of elements] in `hp_dtensor.layout.sharding`."""

    outer: int
    run: int
    inner: int
    held: tuple[tuple[Interval, ...], ...]
    blocks: int | None
    """``O`` of Note [Even cuts are a transpose] in `hp_dtensor.torch.moves.redistribute`; None where the cut is
    uneven, or the group's order is not the axis's."""

    @staticmethod
    def of(placement: Placement, place: Place) -> Cut:
        outer, run, inner = run_view(placement, place.bare, place.whole)
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        even = run % (factor * place.n) == 0
        if isinstance(placement, RaggedShard):
            even = len(set(placement.units)) == 1 and not placement.owners
        held = parts(placement, run, place.n)
        if place.order is not None:
            held, even = tuple(held[index] for index in place.order), False
        return Cut(outer, run, inner, held, outer * factor if even else None)

    def of_run(self, run: int) -> Cut:
        """Return the same shards of the longer range that begins with this one's dim."""
        scale = run // self.run
        held = tuple(tuple((start * scale, length * scale) for start, length in each) for each in self.held)
        return Cut(self.outer, run, self.inner // scale, held, self.blocks)

    @property
    def lengths(self) -> list[int]:
        """How much of the run each rank holds."""
        return [sum(length for _, length in held) for held in self.held]

    @property
    def in_order(self) -> bool:
        """Tell whether the pieces, one after the other, are the tensor."""
        starts = [start for held in self.held for start, _ in held]
        return self.outer == 1 and all(len(held) < 2 for held in self.held) and starts == sorted(starts)


def common(mine: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """Return the overlap of ``mine`` and ``theirs`` as (offset in the concatenation of ``mine``, length), in order."""
    overlaps: list[Interval] = []
    offset = 0
    for start, length in mine:
        for other, size in theirs:
            low, high = max(start, other), min(start + length, other + size)
            if low < high:
                overlaps.append((offset + low - start, high - low))
        offset += length
    return overlaps
