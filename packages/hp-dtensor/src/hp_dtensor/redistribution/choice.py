"""The cheapest of several sets of placements to which operands could be redistributed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.redistribution.planner import cost
from hp_dtensor.redistribution.prices import step_cost, step_type

__all__ = ["cheapest"]

Placements = tuple[Placement, ...]
T = TypeVar("T")
PLANNED = 8
"""The number of sets of placements that are priced by their plans; an estimate selects them."""


def cheapest(
    choices: Sequence[T],
    targets: Sequence[Sequence[Placements]],
    sources: Sequence[Placements],
    shapes: Sequence[Sequence[int]],
    mesh_shape: Sequence[int],
    itemsizes: Sequence[int],
) -> T:
    """Return the choice that redistributes the operands with the fewest bytes per rank; of equal ones the first.

    The price is that of the planner's plans. A plan over three axes takes milliseconds to find, so only the `PLANNED`
    choices are planned that cost least if each axis changes by itself.

    Args:
        choices: the choices; at least one.
        targets: for each choice, the placements of each operand.
        sources: the present placements of each operand.
        shapes: global shape of each operand.
        mesh_shape: ranks on each mesh axis.
        itemsizes: bytes per element of each operand.
    """
    operands = [*zip(sources, (tuple(shape) for shape in shapes), itemsizes, strict=True)]
    mesh = tuple(mesh_shape)

    def estimate(index: int) -> int:
        moves = zip(targets[index], operands, strict=True)
        return sum(size * _axis_by_axis(src, dst, shape, mesh) for dst, (src, shape, size) in moves if src != dst)

    def price(index: int) -> float:
        moves = zip(targets[index], operands, strict=True)
        try:
            return sum(cost(src, dst, shape, mesh, size) for dst, (src, shape, size) in moves if src != dst)
        except ValueError:  # no tensor of this shape has these placements
            return math.inf

    best = (math.inf, 0)
    for index in sorted(range(len(choices)), key=estimate)[:PLANNED]:
        best = min(best, (price(index), index))
        if not best[0]:
            break
    return choices[best[1]]


@lru_cache(maxsize=16384)
def _axis_by_axis(src: Placements, dst: Placements, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """Return the elements that a rank moves if the axes change in order, through Replicate if a step needs that."""
    total, state = 0, src
    for axis, target in enumerate(dst):
        if state[axis] == target:
            continue
        direct = step_type(state[axis], target) is not None
        for each in (target,) if direct else (Replicate(), target):
            after = (*state[:axis], each, *state[axis + 1 :])
            kind = step_type(state[axis], each)
            assert kind is not None
            total += step_cost(kind(axis, state, after), shape, mesh_shape)
            state = after
    return total
