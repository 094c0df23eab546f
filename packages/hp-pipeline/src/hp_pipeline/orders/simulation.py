"""A clock for each rank and channel: when each step of an order begins and ends."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from hp_pipeline.orders.needs import needs_of, peak_bytes
from hp_pipeline.orders.pipeline import Pipeline
from hp_pipeline.orders.steps import BACKWARDS, MetaStep, MetaStepType, Order, compute_parts, computing

_T = MetaStepType


class Span(NamedTuple):
    """A step and when it runs, in seconds from the first step of all."""

    step: MetaStep
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What an order comes to, in time and memory.

    Attributes:
        spans: by rank, the computing steps in their order.
        peaks: the most bytes that each rank holds at once.
    """

    spans: tuple[tuple[Span, ...], ...]
    peaks: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first step's begin to the last one's end."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Seconds of the makespan in which the busiest rank does not compute."""
        return self.makespan - max(self.busy)

    @property
    def bubble_ratio(self) -> float:
        """The bubble's share of the makespan."""
        return self.bubble / self.makespan if self.makespan else 0.0


def halves(order: Order) -> frozenset[tuple[int, int, int]]:
    """Return the (stage, micro-batch, slice) whose backward is in two halves."""
    return frozenset(
        (part.stage_index, part.micro_index, part.seq_index)  # type: ignore[misc]
        for steps in order.values()
        for each in steps
        for part in compute_parts(each)
        if part.step_type is _T.BACKWARD_INPUT
    )


def simulate(order: Order, pipeline: Pipeline) -> Trace:
    """Run an order on clocks.

    A rank computes one step at a time, in its order. A message begins when the step that made it ends and the channel
    (one rank to another, in one direction) is free, and takes ``pipeline.cost.send``. Two steps that run together take
    the time of both: what they hide from each other is communication inside of stages, which costs of stages hold.

    Args:
        order: steps by rank; those that don't compute take no time.
        pipeline: what it is for, with its costs.

    Returns:
        The trace.

    Raises:
        ValueError: the order does not run to its end; ``check`` says why.
    """
    order = computing(order)
    needs = needs_of(pipeline, halves(order))
    placement, send = pipeline.placement, pipeline.cost.send
    seconds = pipeline.seconds
    ends: dict[MetaStep, float] = {}
    arrivals: dict[tuple[MetaStep, int], float] = {}
    channels: dict[tuple[int, int, bool], float] = defaultdict(float)
    spans: dict[int, list[Span]] = {rank: [] for rank in order}
    waiting: dict[MetaStep, list[int]] = defaultdict(list)
    ready = deque(order)
    while ready:
        rank = ready.popleft()
        for each in order[rank][len(spans[rank]) :]:
            asked = needs(each)
            lacking = next((need for need in asked if need not in ends), None)
            if lacking is not None:
                waiting[lacking].append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0.0
            for need in asked:
                start = max(start, arrivals.get((need, rank), ends[need]))
            end = start + sum(seconds[part.step_type][part.stage_index] for part in compute_parts(each))  # type: ignore[index]
            spans[rank].append(Span(each, start, end))
            for part in compute_parts(each):
                ends[part] = end
                stage, ahead = part.stage_index, part.step_type is _T.FORWARD
                assert stage is not None
                if send and (ahead or part.step_type in BACKWARDS):
                    targets = pipeline.remote(stage, (pipeline.successors if ahead else pipeline.predecessors)[stage])
                    for target in dict.fromkeys(placement[other] for other in targets):
                        channel = rank, target, ahead
                        channels[channel] = arrivals[part, target] = max(end, channels[channel]) + send
                ready.extend(waiting.pop(part, ()))
    if any(len(spans[rank]) < len(order[rank]) for rank in order):
        raise ValueError("simulate: the order does not run to its end; check(order, pipeline) says why.")
    return Trace(tuple(tuple(spans[rank]) for rank in sorted(order)), peak_bytes(order, pipeline))
