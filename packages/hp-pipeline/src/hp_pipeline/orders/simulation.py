"""A clock for each rank and channel: when each step begins and ends, the memory it takes, and pictures of the trace.

Note [What a step needs]
    A forward needs the forwards of the stages before it, or the receives of what they pass on where they are on other
    ranks, and the forward of the slice before it. A backward needs its forward, the backwards of the stages after it
    (or the receives), and the backward of the slice after it. A backward for the weights needs the one for the inputs.
    A send needs what it sends; a receive needs the sends to it. All but the last are steps of the same rank.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from hp_pipeline.orders.pipeline import BACKWARDS, MetaStep, MetaStepType, Order, Pipeline, compute_parts, computing

# ---- memory, step by step ----
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


_F, _B, _I, _W = _T.FORWARD, _T.BACKWARD, _T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT
_FS, _FR, _BS, _BR = _T.FWD_SEND, _T.FWD_RECV, _T.BWD_SEND, _T.BWD_RECV


class Needs:
    """The needs of steps in a pipeline.

    Args:
        pipeline: what the steps are for.
        split: the stages and micro-batches whose backward is in two halves: (stage, micro-batch, slice).
        lowered: sends and receives are steps; else a compute step needs those of other ranks themselves.
    """

    def __init__(self, pipeline: Pipeline, split: Collection[tuple[int, int, int]], lowered: bool) -> None:
        self._split, self._slices = frozenset(split), pipeline.seq_slices
        self._listed: dict[MetaStep, tuple[MetaStep, ...]] = {}
        placement = pipeline.placement
        self._before, self._after, self._far_before, self._far_after = [], [], [], []
        for stage in range(len(placement)):
            before, after = pipeline.predecessors[stage], pipeline.successors[stage]
            far_before, far_after = pipeline.remote(stage, before), pipeline.remote(stage, after)
            self._before.append([each for each in before if not lowered or each not in far_before])
            self._after.append([each for each in after if not lowered or each not in far_after])
            self._far_before.append(far_before)
            self._far_after.append(far_after)
        self._lowered = lowered

    def backward(self, stage: int, micro: int, part: int) -> MetaStep:
        """Return the step after which the gradients of a stage's inputs are there."""
        return MetaStep(micro, _I if (stage, micro, part) in self._split else _B, stage, None, part)

    def __call__(self, each: MetaStep) -> tuple[MetaStep, ...]:
        """List the steps that must be done before this one begins; for a composite, those of both its parts."""
        listed = self._listed.get(each)
        if listed is None:
            listed = self._listed[each] = tuple(self._list(each))
        return listed

    def _list(self, each: MetaStep) -> list[MetaStep]:
        micro, kind, stage, parts, part = each
        if parts:
            return [need for sub in parts for need in self(sub)]
        if micro is None or stage is None:
            return []
        if kind is _F:
            needs = [MetaStep(micro, _F, other, None, part) for other in self._before[stage]]
            if self._lowered and self._far_before[stage]:
                needs.append(MetaStep(micro, _FR, stage, None, part))
            if part:
                needs.append(MetaStep(micro, _F, stage, None, part - 1))
            return needs
        if kind is _B or kind is _I:
            needs = [MetaStep(micro, _F, stage, None, part)]
            needs += [self.backward(other, micro, part) for other in self._after[stage]]
            if self._lowered and self._far_after[stage]:
                needs.append(MetaStep(micro, _BR, stage, None, part))
            if part + 1 < self._slices:
                needs.append(self.backward(stage, micro, part + 1))
            return needs
        if kind is _W:
            return [MetaStep(micro, _I, stage, None, part)]
        if kind is _FS:
            return [MetaStep(micro, _F, stage, None, part)]
        if kind is _BS:
            return [self.backward(stage, micro, part)]
        if kind is _FR:
            return [MetaStep(micro, _FS, other, None, part) for other in self._far_before[stage]]
        if kind is _BR:
            return [MetaStep(micro, _BS, other, None, part) for other in self._far_after[stage]]
        earlier = {_T.OFFLOAD: _F, _T.WAIT_OFFLOAD: _T.OFFLOAD, _T.LOAD: _T.WAIT_OFFLOAD, _T.WAIT_LOAD: _T.LOAD}
        return [MetaStep(micro, earlier[kind], stage, None, part)] if kind in earlier else []


@functools.lru_cache(maxsize=8)
def needs_of(pipeline: Pipeline, split: frozenset[tuple[int, int, int]]) -> Needs:
    """Get the needs of computing steps, those of one pipeline listed once for all orders that are compared."""
    return Needs(pipeline, split, lowered=False)


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


_COLORS = {_T.FORWARD: "#9ecae1", _T.BACKWARD: "#a1d99b", _T.BACKWARD_INPUT: "#c7e9c0", _T.BACKWARD_WEIGHT: "#fdd0a2"}
_JOINT = "#bcbddc"
_ROW, _LEFT, _WIDTH = 22, 60, 1200


def to_svg(trace: Trace) -> str:
    """Draw a trace: a row a rank, a box a step with its micro-batch; borders of a rank's later stages are black.

    Args:
        trace: of ``simulate``.

    Returns:
        The SVG document, 1,260 points wide.
    """
    scale = _WIDTH / (trace.makespan or 1.0)
    height = _ROW * len(trace.spans) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="11">'
    ]
    for rank, spans in enumerate(trace.spans):
        y = rank * _ROW
        parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
        lowest = min((part.stage_index or 0 for span in spans for part in compute_parts(span.step)), default=0)
        for span in spans:
            own = compute_parts(span.step)
            color = _COLORS[own[0].step_type] if len(own) == 1 else _JOINT
            x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
            border = "#636363" if (own[0].stage_index or 0) == lowest else "#000000"
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}"'
                f' fill="{color}" stroke="{border}">'
                f"<title>{escape(str(span.step))}: {span.start:g} to {span.end:g} s</title></rect>"
            )
            if width > 9:
                text = "+".join(str(part.micro_index) for part in own)
                parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{text}</text>')
    share = f"{trace.makespan:g} s, bubble {trace.bubble:g} s ({trace.bubble_ratio:.1%})"
    parts.append(f'<text x="{_LEFT}" y="{height - 8}">{share}</text></svg>')
    return "\n".join(parts)


def to_text(trace: Trace, width: int = 100) -> str:
    """Draw a trace in characters: a line a rank, the step that runs at each moment by its type, ``.`` for none.

    Args:
        trace: of ``simulate``.
        width: characters of a line, at least 1.
    """
    lines = []
    for rank, spans in enumerate(trace.spans):
        row = ["."] * width
        for span in spans:
            first = round(span.start / (trace.makespan or 1.0) * width)
            last = max(first + 1, round(span.end / (trace.makespan or 1.0) * width))
            kind = span.step.step_type.value if not span.step.sub_steps else "X"
            row[first:last] = kind * (last - first)
        lines.append(f"rank {rank:3d} |{''.join(row[:width])}| {_bytes(trace.peaks[rank])}")
    times = f"bubble {_seconds(trace.bubble)} of {_seconds(trace.makespan)} ({trace.bubble_ratio:.1%})"
    return "\n".join([*lines, times])


def _bytes(count: float) -> str:
    """Format bytes for people.

    >>> _bytes(700), _bytes(1.5 * 2**20), _bytes(3 * 2**30)
    ('700 bytes', '1.5 MiB', '3.0 GiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:g} bytes"


def _seconds(time: float) -> str:
    """Format seconds for people.

    >>> _seconds(2.5), _seconds(0.00034), _seconds(0.0)
    ('2.5 s', '340 us', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}"
    return f"{time:g} s"


def to_chrome(trace: Trace) -> str:
    """Write a trace as JSON that chrome://tracing and Perfetto read; a second of the trace is a second there.

    Args:
        trace: of ``simulate``.
    """
    events = [
        {
            "name": str(span.step),
            "cat": span.step.step_type.name,
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "pid": 0,
            "tid": rank,
        }
        for rank, spans in enumerate(trace.spans)
        for span in spans
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(trace.spans))
    ]
    return json.dumps({"traceEvents": names + events})
