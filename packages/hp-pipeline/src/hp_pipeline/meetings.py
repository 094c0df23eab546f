"""Where a forward and a backward that run together meet, as data.

Note [Meetings]
    Exchanges between ranks (a dispatch of tokens to experts, and the combine of what they return) stand between the
    computing parts of a stage. Two threads run a forward and a backward together. Before and after each exchange a
    thread meets the other: one begins its exchange, and the other then computes until its own next exchange. So one of
    them computes at a time, with the other's exchange under way, and the order of all they do is that of the meetings.
    The n-th meeting of the forward is with the n-th of the backward, and their roles must be opposite.

    A forward begins an exchange, computes, begins the next: COMM, COMPUTE, COMM ... A backward comes to the same hooks
    from the last to the first, and does at each what the forward did not. The hook behind the last exchange of a stage
    is left out, so that a backward begins its first exchange at once, while the forward computes up to its own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hp_pipeline.steps import MetaStep, MetaStepType, Order

__all__ = ["HookRole", "Meeting", "Meetings", "backward_meetings", "check_meetings"]


class HookRole(enum.Enum):
    """What a thread does after a meeting: begin an exchange, or compute."""

    COMM = "comm"
    COMPUTE = "compute"

    @property
    def other(self) -> HookRole:
        """The role of the thread that is met."""
        return HookRole.COMPUTE if self is HookRole.COMM else HookRole.COMM


class Meeting(NamedTuple):
    """A hook that a forward comes to, and what the forward does then."""

    hook: str
    role: HookRole


Meetings = Mapping[int, Sequence[Meeting]]
"""The meetings of each stage's forward, in their order."""


def backward_meetings(forward: Sequence[Meeting]) -> list[Meeting]:
    """Return the meetings of the backward of a stage: those of its forward from the last, in the other role."""
    return [Meeting(hook, role.other) for hook, role in reversed(forward)]


def check_meetings(order: Order, meetings: Meetings) -> None:
    """Prove that all steps of an order that run together meet in opposite roles.

    Raises:
        ValueError: two that do not, with the place in words.
    """
    checked = set()
    for rank, steps in order.items():
        for step in steps:
            if step.sub_steps:
                forward, backward = parts_of(step)
                pair = forward.stage_index, backward.stage_index
                if pair not in checked:
                    checked.add(pair)
                    _check_pair(rank, step, meetings)


def parts_of(step: MetaStep) -> tuple[MetaStep, MetaStep]:
    """Return the forward and the backward of two steps that run together."""
    assert step.sub_steps is not None
    first, second = step.sub_steps
    return (first, second) if first.step_type is MetaStepType.FORWARD else (second, first)


def _check_pair(rank: int, step: MetaStep, meetings: Meetings) -> None:
    forward, backward = parts_of(step)
    ahead = meetings.get(forward.stage_index or 0, ())
    back = backward_meetings(meetings.get(backward.stage_index or 0, ()))
    for place, (one, other) in enumerate(zip(ahead, back, strict=False)):
        if one.role is other.role:
            both = "begin an exchange" if one.role is HookRole.COMM else "compute"
            raise ValueError(
                f"rank {rank}: at meeting {place} of {step} both {both}: {forward} at {one.hook} and {backward} at"
                f" {other.hook}. Hooks stand before and after each exchange; the one after a stage's last is left out:"
                " wrap_combine(fn, is_last_layer=True)."
            )
