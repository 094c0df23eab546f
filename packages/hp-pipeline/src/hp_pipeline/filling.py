"""Backwards for the weights, moved to where a rank would wait."""

from __future__ import annotations

from collections import defaultdict, deque

from hp_pipeline.needs import needs_of
from hp_pipeline.pipeline import Pipeline
from hp_pipeline.simulation import halves
from hp_pipeline.steps import MetaStep, MetaStepType, Order, compute_parts, computing

__all__ = ["fill"]

_T = MetaStepType


def fill(order: Order, pipeline: Pipeline, limit: int | None = None) -> Order | None:
    """Keep the order of all other steps, and put the backwards for the weights where ranks would wait.

    Nobody waits for a backward for the weights: it runs where the next step of its rank cannot begin for as long as it
    takes, where the limit asks for its memory, and at the end.

    Args:
        order: computing steps by rank.
        pipeline: what it is for; its costs say how long ranks would wait.
        limit: open forwards a rank, as for ``greedy``; None for no limit.

    Returns:
        The order; None where the limit cannot be kept with this order of forwards.
    """
    order = computing(order)
    needs = needs_of(pipeline, halves(order))
    placement, send, seconds = pipeline.placement, pipeline.cost.send, pipeline.seconds
    weights = seconds[_T.BACKWARD_WEIGHT]
    queues = {
        rank: deque(each for each in steps if each.step_type is not _T.BACKWARD_WEIGHT) for rank, steps in order.items()
    }
    waiting_weights: dict[int, deque[MetaStep]] = {rank: deque() for rank in order}
    result: dict[int, list[MetaStep]] = {rank: [] for rank in order}
    clocks, opened = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)
    ends: dict[MetaStep, float] = {}
    waiting: dict[MetaStep, list[int]] = defaultdict(list)

    def run(rank: int, step: MetaStep, start: float) -> None:
        for part in compute_parts(step):
            assert part.stage_index is not None
            start += seconds[part.step_type][part.stage_index]
            kind = part.step_type
            opened[rank] += (kind is _T.FORWARD) - (kind in (_T.BACKWARD_WEIGHT, _T.BACKWARD))
            if kind is _T.BACKWARD_INPUT:
                waiting_weights[rank].append(part._replace(step_type=_T.BACKWARD_WEIGHT))
        for part in compute_parts(step):
            ends[part] = start
        clocks[rank] = start
        result[rank].append(step)

    ready = deque(order)
    while ready:
        rank = ready.popleft()
        queue, late = queues[rank], waiting_weights[rank]
        while queue:
            step = queue[0]
            asked = needs(step)
            lacking = next((need for need in asked if need not in ends), None)
            if lacking is not None:
                waiting[lacking].append(rank)
                break
            start = clocks[rank]
            for need in asked:
                assert need.stage_index is not None
                start = max(start, ends[need] + (send if placement[need.stage_index] != rank else 0.0))
            full = limit is not None and step.step_type is _T.FORWARD and opened[rank] >= limit
            if late and (full or start - clocks[rank] >= weights[late[0].stage_index or 0]):
                run(rank, late.popleft(), clocks[rank])
                continue
            if full:
                return None
            run(rank, queue.popleft(), start)
            for part in compute_parts(step):
                ready.extend(waiting.pop(part, ()))
    if any(queues.values()):
        return None
    for rank, late in waiting_weights.items():
        result[rank] += late
    return {rank: tuple(steps) for rank, steps in result.items()}
