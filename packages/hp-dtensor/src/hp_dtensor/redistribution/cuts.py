"""A step of a redistribution as one rank sees it: sizes and intervals, the same for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_dtensor.layout.placements import Placement, RaggedShard, Replicate, StridedShard
from hp_dtensor.layout.sharding import Interval, local_shape, parts, run_view
from hp_dtensor.redistribution.steps import Step


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
    """``O`` of Note [Even cuts are a transpose] in `hp_dtensor.torch.moves.exchange`; None where the cut is uneven, or
    the group's order is not the axis's."""

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
