"""Held: gathered parameters and unsharded gradients over time, by replaying the moments of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_fsdp.timeline import Moment, last_reductions

if TYPE_CHECKING:
    from hp_fsdp.explaining import GroupFacts

__all__ = ["Held", "replay"]


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank held from a moment on.

    Attributes:
        at: seconds from the beginning of the step.
        parameters: bytes of gathered parameters, what groups keep between forward and backward included.
        gradients: bytes of unsharded gradients' buffers.
        groups: names of the groups that were gathered, in the order of the gathers.
    """

    at: float
    parameters: int
    gradients: int
    groups: tuple[str, ...]


def replay(
    moments: Sequence[Moment], groups: Sequence[GroupFacts], *, accumulating: Collection[str] = ()
) -> tuple[Held, ...]:
    """What was held after each moment of a step that changed it.

    A group that computes or is freed without a gather before was gathered when the step began.

    Args:
        moments: of one pass, in their order.
        groups: how many bytes they are.
        accumulating: names of groups that keep their unsharded gradients, for they don't reduce them yet.
    """
    facts = {group.name: group for group in groups}
    firsts: dict[str, str] = {}
    for kind, name, _ in moments:
        if name in facts and kind in ("gather", "run", "free"):
            firsts.setdefault(name, kind)
    gathered = {name: facts[name].gathered_bytes for name, kind in firsts.items() if kind != "gather"}
    kept: dict[str, int] = {}
    gradients: dict[str, int] = {}
    ran: set[str] = set()
    forward = True
    made: list[Held] = []

    def held(now: int) -> Held:
        return Held(
            at=(now - moments[0][2]) * 1e-9,
            parameters=sum(gathered.values()) + sum(kept.values()),
            gradients=sum(gradients.values()),
            groups=tuple(name for name, size in gathered.items() if size),
        )

    if gathered:
        made.append(held(moments[0][2]))
    complete = last_reductions(moments)
    for index, (kind, name, now) in enumerate(moments):
        forward = forward and kind != "backward"
        if name not in facts:
            continue
        group = facts[name]
        if kind == "gather":
            gathered[name] = group.gathered_bytes
        elif kind == "free":
            gathered.pop(name, None)
            kept.pop(name, None)
            if forward and name in ran and group.after_forward < group.gathered_bytes:
                kept[name] = group.after_forward
        elif kind == "reduce" or (kind == "left" and not forward and name in accumulating):
            gradients[name] = group.gradient_bytes
        elif index in complete:
            gradients.pop(name, None)
        elif kind == "run" and forward:
            ran.add(name)
            continue
        else:
            continue
        made.append(held(now))
    return tuple(made)
