"""From what ranks compute to all that they do: sends, receives, and the steps of sharded parameters."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from hp_pipeline.orders.pipeline import BACKWARDS, TRANSFERS, MetaStep, MetaStepType, Order, Pipeline, compute_parts

_T = MetaStepType
Piece = tuple[int | None, int]
_GRADIENTS = frozenset({_T.BACKWARD, _T.BACKWARD_WEIGHT})


def is_lowered(order: Order) -> bool:
    """Tell whether sends and receives are among an order's steps."""
    return any(step.step_type in TRANSFERS for steps in order.values() for step in steps)


def lower(order: Order, pipeline: Pipeline, *, sharded: Collection[int] = (), swapped: Collection[int] = ()) -> Order:
    """Add to the computing steps of each rank all others that they ask for.

    A receive stands before the step that needs it, a send after the step that makes what is sent; what passes between
    two stages of one rank is neither. The runtime posts receives before it comes to them and does not wait for sends,
    so that their places only say in which order messages are on each channel: that in which they are made. Where a rank
    takes them in another, it receives those that come earlier too.

    Args:
        order: computing steps by rank.
        pipeline: what it is for.
        sharded: stages whose parameters are sharded: they are gathered before a stage's first step in each run of its
            steps, and their gradients are reduced once, after its last.
        swapped: stages whose saved tensors go to the host between forward and backward, unless the one follows the
            other: while the next step computes, and back while the one before the backward does.

    Returns:
        The order with all steps; an order that has sends or receives comes back as it is.
    """
    if is_lowered(order):
        return order
    pieces = _pieces(order)
    return {rank: _lowered(steps, pipeline, pieces, set(sharded), set(swapped)) for rank, steps in order.items()}


def _pieces(order: Order) -> dict[tuple[int | None, bool], list[Piece]]:
    """List, for each stage and direction, the pieces of the batch in the order in which the stage computes them."""
    pieces: dict[tuple[int | None, bool], list[Piece]] = defaultdict(list)
    for steps in order.values():
        for step in steps:
            for micro, kind, stage, _, part in compute_parts(step):
                if kind is _T.FORWARD or kind in BACKWARDS:
                    pieces[stage, kind is _T.FORWARD].append((micro, part))
    return pieces


def _lowered(
    steps: tuple[MetaStep, ...],
    pipeline: Pipeline,
    pieces: Mapping[tuple[int | None, bool], list[Piece]],
    sharded: set[int],
    swapped: set[int],
) -> tuple[MetaStep, ...]:
    placement, result = pipeline.placement, []
    due: dict[tuple[int, bool], deque[Piece]] = {}

    def receive(stage: int, ahead: bool, piece: Piece) -> None:
        """Receive a piece, and first those that are made before it."""
        if (stage, ahead) not in due:
            others = (pipeline.predecessors if ahead else pipeline.successors)[stage]
            due[stage, ahead] = deque(pieces[pipeline.remote(stage, others)[0], ahead])
        waiting = due[stage, ahead]
        kind = _T.FWD_RECV if ahead else _T.BWD_RECV
        while piece in waiting:
            micro, part = waiting.popleft()
            result.append(MetaStep(micro, kind, stage, None, part))

    far_before = [bool(pipeline.remote(stage, pipeline.predecessors[stage])) for stage in range(len(placement))]
    far_after = [bool(pipeline.remote(stage, pipeline.successors[stage])) for stage in range(len(placement))]
    last = {part.stage_index: index for index, step in enumerate(steps) for part in compute_parts(step)}
    gradients = {part.stage_index for step in steps for part in compute_parts(step) if part.step_type in _GRADIENTS}
    gathered: set[int | None] = set()
    ahead, behind, leaving = _swaps(steps, swapped) if pipeline.has_backward else ({}, {}, {})
    for index, step in enumerate(steps):
        after: list[MetaStep] = []
        result += ahead.get(index, ())
        needed = {part.stage_index for part in compute_parts(step)} & sharded
        if needed - gathered:
            result += _of_stages(_T.RESHARD, gathered - needed) + _of_stages(_T.UNSHARD, needed - gathered)
            gathered = needed
        for micro, kind, stage, _, part in compute_parts(step):
            if stage is None or not 0 <= stage < len(placement):  # ``check`` says so
                continue
            if kind is _T.FORWARD:
                if far_before[stage]:
                    receive(stage, True, (micro, part))
                if far_after[stage]:
                    after.append(MetaStep(micro, _T.FWD_SEND, stage, None, part))
            elif kind in BACKWARDS:
                if far_after[stage]:
                    receive(stage, False, (micro, part))
                if far_before[stage]:
                    after.append(MetaStep(micro, _T.BWD_SEND, stage, None, part))
        result += [step, *after, *behind.get(index, ()), *leaving.get(index, ())]
        result += _of_stages(_T.REDUCE_GRAD, {stage for stage in needed & gradients if last[stage] == index})
    return (*result, *_of_stages(_T.RESHARD, gathered))


def _of_stages(kind: MetaStepType, stages: Collection[int | None]) -> list[MetaStep]:
    return [MetaStep(None, kind, stage) for stage in sorted(stages)]  # type: ignore[type-var]


Added = dict[int, list[MetaStep]]


def _swaps(steps: Sequence[MetaStep], swapped: set[int]) -> tuple[Added, Added, Added]:
    """List the steps that swap: before the step at a place, after it, and after those."""
    ahead: Added = defaultdict(list)
    behind: Added = defaultdict(list)
    leaving: Added = defaultdict(list)
    forwards: dict[tuple[int | None, int | None, int], int] = {}
    for index, step in enumerate(steps):
        for micro, kind, stage, _, part in compute_parts(step):
            if stage not in swapped:
                continue
            if kind is _T.FORWARD:
                forwards[stage, micro, part] = index
            elif kind in BACKWARDS and (place := forwards.get((stage, micro, part), index)) < index - 1:
                leaving[place].append(MetaStep(micro, _T.OFFLOAD, stage, None, part))
                behind[place + 1].append(MetaStep(micro, _T.WAIT_OFFLOAD, stage, None, part))
                ahead[max(index - 1, place + 2)].append(MetaStep(micro, _T.LOAD, stage, None, part))
                ahead[index].append(MetaStep(micro, _T.WAIT_LOAD, stage, None, part))
    return ahead, behind, leaving
