"""What a rank holds, step by step, by the costs of a pipeline."""

from __future__ import annotations

import functools

from hp_pipeline.pipeline import Pipeline
from hp_pipeline.steps import MetaStep, MetaStepType, Order, compute_parts

__all__ = ["changes", "held_bytes", "open_forwards", "peak_bytes"]

_T = MetaStepType


@functools.lru_cache(maxsize=64)
def changes(pipeline: Pipeline) -> tuple[dict[MetaStepType, float], ...]:
    """Return, by stage, the bytes by which a step of a type changes what its rank holds; other types change nothing."""
    stages = len(pipeline.placement)
    return tuple(
        {
            _T.FORWARD: saved if pipeline.has_backward else 0.0,
            _T.LOAD: saved,
            _T.BACKWARD: -saved,
            _T.WAIT_OFFLOAD: -saved,
            _T.BACKWARD_INPUT: held - saved,
            _T.BACKWARD_WEIGHT: -held,
        }
        for saved, held in zip(pipeline.cost.of("saved", stages), pipeline.cost.of("held", stages), strict=True)
    )


def held_bytes(steps: tuple[MetaStep, ...], rank: int, pipeline: Pipeline) -> list[float]:
    """List the bytes that a rank holds while each step runs; a step that frees some still holds them.

    Two steps that run together hold what both need.
    """
    static = pipeline.cost.of("static", len(pipeline.placement))
    now = sum(static[stage] for stage in pipeline.stages[rank])
    by_stage, result = changes(pipeline), []
    for each in steps:
        amounts = [by_stage[part.stage_index].get(part.step_type, 0.0) for part in compute_parts(each)]  # type: ignore[index]
        result.append(now + sum(amount for amount in amounts if amount > 0))
        now += sum(amounts)
    return result


def peak_bytes(order: Order, pipeline: Pipeline) -> tuple[float, ...]:
    """Return the most bytes that each rank holds at once."""
    return tuple(max(held_bytes(order[rank], rank, pipeline), default=0.0) for rank in range(pipeline.ranks))


def open_forwards(order: Order) -> dict[int, int]:
    """Count, for each rank, the most forwards of a stage and micro-batch that are open: their backward is not done."""
    result = {}
    for rank, steps in order.items():
        now = most = 0
        for each in steps:
            for part in compute_parts(each):
                now += (part.step_type is _T.FORWARD) - (part.step_type in (_T.BACKWARD, _T.BACKWARD_WEIGHT))
                most = max(most, now)
        result[rank] = most
    return result
