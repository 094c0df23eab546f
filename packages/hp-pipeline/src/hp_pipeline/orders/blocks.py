"""Schedules that repeat one block: the passes of a micro-batch at fixed times, a period apart for each micro-batch.

Note [A block]
    With stages there and back again, a micro-batch passes each rank four times (forward of its first and second stage,
    backward for the inputs of the second and first), and each rank has two backwards for the weights. On every rank
    these six, each one unit of time, must fall on different times modulo six; then all micro-batches follow each other
    every six units. A block is seven numbers: the time from rank to rank on each of the four ways, and at the three
    turns. How long a micro-batch is on its way is what it costs in memory: ways of (1, 1, 1, 1) hold a third of what
    1F1B holds, (1, 2, 1, 2) a half, (3, 3, 3, 3) the same. Controllable memory: Qi et al., 2405.15362.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from hp_pipeline.orders.pipeline import Pipeline
from hp_pipeline.orders.steps import MetaStep, MetaStepType, Order

_T = MetaStepType
_PERIOD = 6


@functools.cache
def turns(ranks: int, ways: tuple[int, int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """List the times at the three turns with which no two passes of a rank collide, the shortest first.

    Args:
        ranks: the pipeline ranks.
        ways: the time from rank to rank on each of the four ways.
    """
    times = range(1, _PERIOD + 1)
    gaps = sorted(itertools.product(times, times, times), key=sum)
    return tuple(gap for gap in gaps if all(_distinct(_times(ranks, rank, ways, gap)) for rank in range(ranks)))


def _times(ranks: int, rank: int, ways: Sequence[int], gaps: Sequence[int]) -> tuple[int, int, int, int]:
    """Return when a micro-batch passes a rank: forward of its chunk 0 and 1, backward of its chunk 1 and 0."""
    last, left = ranks - 1, ranks - 1 - rank
    bottom = last * ways[0] + gaps[0]
    top = bottom + last * ways[1] + gaps[1]
    again = top + last * ways[2] + gaps[2]
    return rank * ways[0], bottom + left * ways[1], top + rank * ways[2], again + left * ways[3]


def _distinct(times: Sequence[int]) -> bool:
    return len({time % _PERIOD for time in times}) == len(times)


def block_order(pipeline: Pipeline, ways: tuple[int, int, int, int], gaps: tuple[int, int, int]) -> Order:
    """Write the order of a block out: Note [A block].

    Args:
        pipeline: two stages a rank, there and back again.
        ways: the time from rank to rank on each of the four ways.
        gaps: the times at the three turns, one of ``turns``.
    """
    ranks, kinds = pipeline.ranks, (_T.FORWARD, _T.FORWARD, _T.BACKWARD_INPUT, _T.BACKWARD_INPUT)
    order = {}
    for rank in range(ranks):
        own = _times(ranks, rank, ways, gaps)
        taken = {time % _PERIOD for time in own}
        first, second = (
            time + 1 + (free - time - 1) % _PERIOD
            for time, free in zip(own[2:], (each for each in range(_PERIOD) if each not in taken), strict=True)
        )
        near, far = pipeline.stages[rank]
        passes = [*zip(own, kinds, (near, far, far, near), strict=True)]
        passes += [(first, _T.BACKWARD_WEIGHT, far), (second, _T.BACKWARD_WEIGHT, near)]
        timed = [
            (time + _PERIOD * micro, MetaStep(micro, kind, stage))
            for micro in range(pipeline.micro_batches)
            for time, kind, stage in passes
        ]
        order[rank] = tuple(step for _, step in sorted(timed, key=lambda each: each[0]))
    return order
