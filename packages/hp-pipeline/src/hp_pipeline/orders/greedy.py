"""Orders that are built: by list scheduling under a limit of memory, and by repeating one block.

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
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from hp_pipeline.orders.pipeline import MetaStep, MetaStepType, Order, Pipeline, compute_parts, computing
from hp_pipeline.orders.simulation import Needs, halves, needs_of

# ---- filling waits with weight gradients ----
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


def greedy(pipeline: Pipeline, limit: int, *, prefer: str = "IFW") -> Order:
    """Make an order by taking, whenever a rank is free, the most urgent step that can begin.

    Backwards for the inputs come first, as other ranks wait for them; forwards while fewer than ``limit`` are open;
    backwards for the weights, for which nobody waits, fill what is left, and run at once where the limit is reached. A
    forward of an early stage leaves room for one of each later stage of its rank, so that the oldest micro-batch
    always goes on.

    Args:
        pipeline: what it is for; its costs say when steps end.
        limit: open forwards a rank, of one stage and micro-batch (and slice) each: those whose backward for the
            weights is not done. At least the rank's number of stages.
        prefer: the order of urgency of I, F and W.

    Returns:
        Computing steps by rank.

    Raises:
        ValueError: a limit that leaves no room for one micro-batch.
    """
    least = max(len(stages) for stages in pipeline.stages) * pipeline.seq_slices
    if limit < least:
        raise ValueError(f"greedy: a limit of {limit} open forwards; one micro-batch alone needs {least} on a rank.")
    return _Ranks(pipeline, limit, prefer).run()


class _Ranks:
    """The state of all ranks at one time."""

    def __init__(self, pipeline: Pipeline, limit: int, prefer: str) -> None:
        self.pipeline, self.limit = pipeline, limit
        self.seconds = pipeline.seconds
        self.chunk = {stage: place for own in pipeline.stages for place, stage in enumerate(own)}
        self.steps: dict[int, list[MetaStep]] = {rank: [] for rank in range(pipeline.ranks)}
        self.open = [0] * pipeline.ranks
        # By rank, in the order of urgency: steps that can begin, the most urgent first.
        self.ready: list[dict[_T, list[Any]]] = [{_T(letter): [] for letter in prefer} for _ in self.steps]
        self.lacking: dict[MetaStep, int] = {}
        self.followers: dict[MetaStep, list[MetaStep]] = defaultdict(list)

    def run(self) -> Order:
        """Take steps until all are taken."""
        placement, send = self.pipeline.placement, self.pipeline.cost.send
        begin = self._link()
        # (when, number, rank, step that can begin there); without a step, the rank is free again.
        events: list[tuple[float, int, int, MetaStep | None]] = []
        for step in begin:
            self._offer(step)
        free = dict.fromkeys(self.steps, True)
        touched, number, now = set(self.steps), 0, 0.0
        while True:
            for rank in sorted(touched):
                if not free[rank] or (step := self._take(rank)) is None:
                    continue
                self.steps[rank].append(step)
                assert step.stage_index is not None
                end = now + self.seconds[step.step_type][step.stage_index]
                free[rank] = False
                for follower in self.followers[step]:
                    self.lacking[follower] -= 1
                    if not self.lacking[follower]:
                        assert follower.stage_index is not None
                        target = placement[follower.stage_index]
                        number += 1
                        heapq.heappush(events, (end + (send if target != rank else 0.0), number, target, follower))
                number += 1
                heapq.heappush(events, (end, number, rank, None))
            if not events:
                return {rank: tuple(steps) for rank, steps in self.steps.items()}
            now, touched = events[0][0], set()
            while events and events[0][0] == now:
                _, _, rank, step = heapq.heappop(events)
                touched.add(rank)
                if step is None:
                    free[rank] = True
                else:
                    self._offer(step)

    def _link(self) -> list[MetaStep]:
        """Note what each step needs; return those that need nothing."""
        pipeline = self.pipeline
        kinds = [_T.FORWARD, *((_T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT) if pipeline.has_backward else ())]
        places = itertools.product(
            range(len(pipeline.placement)), range(pipeline.micro_batches), range(pipeline.seq_slices)
        )
        listed = list(places)
        needs = Needs(pipeline, set(listed), lowered=False)
        begin = []
        for stage, micro, part in listed:
            for kind in kinds:
                step = MetaStep(micro, kind, stage, None, part)
                asked = needs(step)
                self.lacking[step] = len(asked)
                for need in asked:
                    self.followers[need].append(step)
                if not asked:
                    begin.append(step)
        return begin

    def _offer(self, step: MetaStep) -> None:
        micro, kind, stage, _, part = step
        assert stage is not None and micro is not None
        later = -self.chunk[stage]
        key = (later, micro, part) if kind is _T.FORWARD else (micro, later, -part)
        heapq.heappush(self.ready[self.pipeline.placement[stage]][kind], (key, step))

    def _take(self, rank: int) -> MetaStep | None:
        """Take the most urgent step that can begin within the limit."""
        for kind, steps in self.ready[rank].items():
            if not steps or kind is _T.FORWARD and not self._fits(rank, steps[0][1]):
                continue
            if self.pipeline.has_backward:
                self.open[rank] += (kind is _T.FORWARD) - (kind is _T.BACKWARD_WEIGHT)
            return heapq.heappop(steps)[1]
        return None

    def _fits(self, rank: int, step: MetaStep) -> bool:
        """Tell whether a forward leaves room for one of each of its rank's later stages and slices."""
        assert step.stage_index is not None
        slices = self.pipeline.seq_slices
        later = len(self.pipeline.stages[rank]) - 1 - self.chunk[step.stage_index]
        return self.open[rank] + later * slices + slices - step.seq_index <= self.limit


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
