"""The steps of a redistribution. Each changes the placement on one mesh axis and leaves the others."""

from __future__ import annotations

from dataclasses import dataclass

from hp_dtensor.layout.placements import Partial, Placement

__all__ = ["AllGather", "AllReduce", "AllToAll", "ReduceScatter", "Slice", "Step", "ToPartial"]


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
