"""The proof, before anything is sent, that an order runs to its end.

Note [Why an order that passes cannot hang]
    Steps are nodes of one directed graph over all ranks: from each step to the next of its rank, and from what a step
    needs (Note [What a step needs]) to the step. Each channel, of one rank to another in one direction, carries its
    messages in one order, which both ends must have. Sends don't wait for their receivers and receives are posted
    ahead, so a rank stands still only where it needs a step that is not done. Ranks can then reach their ends if and
    only if the graph has no cycle: ``check`` lets them run in numbers, and where they stand still walks from need to
    need until it comes back.

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
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hp_pipeline.orders.pipeline import (
    COMPUTE,
    SHARDING,
    TRANSFERS,
    MetaStep,
    MetaStepType,
    Order,
    Pipeline,
    compute_parts,
    computing,
    is_lowered,
    lower,
)
from hp_pipeline.orders.simulation import Needs, peak_bytes

# ---- meetings of a forward and a backward that run together ----


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


_T = MetaStepType
_SHOWN = 6
_FORWARD = {_T.FWD_SEND: _T.FWD_RECV, _T.BWD_SEND: _T.BWD_RECV}


def check(
    order: Order, pipeline: Pipeline, *, memory: float | None = None, meetings: Meetings | None = None
) -> tuple[float, ...]:
    """Prove that an order computes everything once and runs to its end, within a limit of memory.

    Args:
        order: steps by rank, computing steps alone or all (``lower``).
        pipeline: what it is for.
        memory: bytes that a rank may hold at once, by ``pipeline.cost``; None for no limit.
        meetings: by stage, where its forward meets a backward that runs together with it: Note [Meetings].

    Returns:
        The most bytes that each rank holds at once.

    Raises:
        ValueError: a step is missing, there twice, of another rank, or unknown; a send without a receive, or in
            another order than its receives; ranks that wait for each other, with the cycle in words; a stage that is
            gathered twice, or whose gradients are reduced before its last backward; more memory than the limit;
            two steps that run together and meet in the same role.
    """
    _check_ranks(order, pipeline)
    _check_sharding(order)
    split = _check_compute(order, pipeline)
    whole = lower(order, pipeline)
    if is_lowered(order):
        _check_transfers(whole, pipeline)
    _check_channels(whole, pipeline)
    problem = _run(whole, Needs(pipeline, split, lowered=True))
    if problem and not is_lowered(order):  # by the steps that the order names, without sends and receives
        problem = _run(order, Needs(pipeline, split, lowered=False)) or problem
    if problem:
        raise ValueError(problem)
    check_meetings(order, meetings or {})
    peaks = peak_bytes(whole, pipeline)
    if memory is not None and max(peaks) > memory:
        rank = peaks.index(max(peaks))
        raise ValueError(f"rank {rank} holds {peaks[rank]:g} bytes at once, more than the limit of {memory:g}.")
    return peaks


def _few(steps: list[MetaStep]) -> str:
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return ", ".join(map(str, steps[:_SHOWN])) + more


def _check_ranks(order: Order, pipeline: Pipeline) -> None:
    if sorted(order) != list(range(pipeline.ranks)):
        raise ValueError(f"the order names the ranks {sorted(order)}, the placement has {pipeline.ranks} from 0.")
    stages = len(pipeline.placement)
    for rank, steps in order.items():
        for each in steps:
            for part in compute_parts(each):
                stage, micro = part.stage_index, part.micro_index
                if stage is None or not 0 <= stage < stages:
                    raise ValueError(f"rank {rank}: {part} names a stage that is not one of the {stages} there are.")
                if pipeline.placement[stage] != rank:
                    raise ValueError(
                        f"rank {rank}: {part} is a step of rank {pipeline.placement[stage]}, where its stage is."
                    )
                inside = micro is None or 0 <= micro < pipeline.micro_batches
                if not inside or not 0 <= part.seq_index < pipeline.seq_slices:
                    raise ValueError(
                        f"rank {rank}: {part} is outside of {pipeline.micro_batches} micro-batches of"
                        f" {pipeline.seq_slices} slices."
                    )


def _check_compute(order: Order, pipeline: Pipeline) -> set[tuple[int, int, int]]:
    """Check that each forward and backward is there once; return those whose backward is in halves."""
    counts = Counter(
        part for steps in order.values() for each in steps for part in compute_parts(each) if part.step_type in COMPUTE
    )
    doubled = sorted((part for part, count in counts.items() if count > 1), key=str)
    if doubled:
        raise ValueError(f"steps that are there twice: {_few(doubled)}.")
    missing: list[MetaStep] = []
    split = set()
    for stage in range(len(pipeline.placement)):
        for micro in range(pipeline.micro_batches):
            for part in range(pipeline.seq_slices):
                forward, backward, inputs, weights = (
                    MetaStep(micro, kind, stage, None, part)
                    for kind in (_T.FORWARD, _T.BACKWARD, _T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT)
                )
                if forward not in counts:
                    missing.append(forward)
                halves = [half for half in (inputs, weights) if half in counts]
                if halves:
                    split.add((stage, micro, part))
                if not pipeline.has_backward:
                    if halves or backward in counts:
                        raise ValueError(f"{[*halves, backward][0]}: the pipeline has no backward.")
                elif backward in counts and halves:
                    raise ValueError(f"{backward} and {_few(halves)} are the same backward: the whole and its halves.")
                elif backward not in counts and len(halves) < 2:
                    missing += [half for half in (inputs, weights) if half not in counts] if halves else [backward]
    if missing:
        raise ValueError(f"steps that are missing: {_few(missing)}.")
    return split


def _check_sharding(order: Order) -> None:
    """Check that stages are gathered and freed in turn, and gradients reduced once, after the last backward."""
    for rank, steps in order.items():
        if not any(each.step_type in SHARDING for each in steps):
            continue
        gathered: set[int | None] = set()
        reduced: set[int | None] = set()
        for each in steps:
            stage, kind = each.stage_index, each.step_type
            if (kind is _T.UNSHARD and stage in gathered) or (kind is _T.RESHARD and stage not in gathered):
                state = "gathered already" if kind is _T.UNSHARD else "not gathered"
                raise ValueError(f"rank {rank}: {each}, but stage {stage} is {state}.")
            if kind is _T.REDUCE_GRAD and stage in reduced:
                raise ValueError(f"steps that are there twice: {each}.")
            for part in compute_parts(each):
                if part.stage_index in reduced and part.step_type in COMPUTE - {_T.FORWARD}:
                    raise ValueError(f"rank {rank}: {part} comes after {part.stage_index}FG, which reduces gradients.")
            if kind is _T.UNSHARD:
                gathered.add(stage)
            elif kind is _T.RESHARD:
                gathered.remove(stage)
            elif kind is _T.REDUCE_GRAD:
                reduced.add(stage)
        if gathered:
            raise ValueError(f"rank {rank}: the stages {sorted(gathered)} are gathered at the end; add RESHARD.")  # type: ignore[type-var]


def _check_transfers(order: Order, pipeline: Pipeline) -> None:
    """Check that each rank sends and receives what its computing steps make and need, once."""
    lowered = lower(computing(order), pipeline)
    for rank, steps in order.items():
        expected = Counter(each for each in lowered[rank] if each.step_type in TRANSFERS)
        actual = Counter(each for each in steps if each.step_type in TRANSFERS)
        for what, extra in (("missing", expected - actual), ("too many", actual - expected)):
            if extra:
                raise ValueError(f"rank {rank}: sends or receives {what}: {_few(sorted(extra.elements(), key=str))}.")


def _check_channels(order: Order, pipeline: Pipeline) -> None:
    """Check that both ends of each channel have the same messages in the same order."""
    sends: dict[tuple[int, int, MetaStepType], list[MetaStep]] = defaultdict(list)
    receives: dict[tuple[int, int, MetaStepType], list[MetaStep]] = defaultdict(list)
    for steps in order.values():
        for each in steps:
            micro, kind, stage, _, part = each
            if kind in _FORWARD:
                assert stage is not None
                ahead = kind is _T.FWD_SEND
                for other in pipeline.remote(stage, (pipeline.successors if ahead else pipeline.predecessors)[stage]):
                    message = MetaStep(micro, _FORWARD[kind], other, None, part)
                    sends[stage, other, _FORWARD[kind]].append(message)
            elif kind in (_T.FWD_RECV, _T.BWD_RECV):
                assert stage is not None
                ahead = kind is _T.FWD_RECV
                for other in pipeline.remote(stage, (pipeline.predecessors if ahead else pipeline.successors)[stage]):
                    receives[other, stage, kind].append(each)
    for source, target, kind in sends:
        pairs = zip(sends[source, target, kind], receives[source, target, kind], strict=True)
        for place, (sent, received) in enumerate(pairs):
            if sent != received:
                ranks = f"rank {pipeline.placement[source]} to rank {pipeline.placement[target]}"
                raise ValueError(
                    f"message {place} from {ranks}, of stage {source} to stage {target}, is for {sent}, but the receive"
                    f" posted there is {received}: a channel keeps the order of its sends."
                )


def _run(order: Order, needs: Needs) -> str:
    """Let the ranks run as far as they can; return the cycle in words if one does not reach its end, else ""."""
    done: set[MetaStep] = set()
    waiting: dict[MetaStep, list[int]] = defaultdict(list)
    places = dict.fromkeys(order, 0)
    ready = deque(order)
    while ready:
        rank = ready.popleft()
        steps, place = order[rank], places[rank]
        while place < len(steps):
            each = steps[place]
            need = next((need for need in needs(each) if need not in done), None)
            if need is not None:
                waiting[need].append(rank)
                break
            for part in (each, *(each.sub_steps or ())):
                done.add(part)
                if part in waiting:
                    ready.extend(waiting.pop(part))
            place += 1
        places[rank] = place
    stuck = {rank: steps[places[rank]] for rank, steps in order.items() if places[rank] < len(steps)}
    return _cycle(order, places, stuck, needs, done) if stuck else ""


def _cycle(order: Order, places: dict[int, int], stuck: dict[int, MetaStep], needs: Needs, done: set[MetaStep]) -> str:
    """Describe a cycle of ranks that wait for each other, or the step that nobody runs."""
    owner = {
        part: rank for rank in stuck for each in order[rank][places[rank] :] for part in (each, *(each.sub_steps or ()))
    }
    rank, seen = next(iter(stuck)), {}
    links: list[str] = []
    while rank not in seen:
        seen[rank] = len(links)
        each = stuck[rank]
        need = next(need for need in needs(each) if need not in done)
        if need not in owner:
            return f"rank {rank}: {each} needs {need}, which is in no rank's steps."
        links.append(f"rank {rank} is at {each} and needs {need} of rank {owner[need]}")
        rank = owner[need]
    if len(links) - seen[rank] == 1:
        each = stuck[rank]
        need = next(need for need in needs(each) if need not in done)
        return f"rank {rank}: {each} needs {need}, which comes later on the same rank."
    kind = need.step_type.name.lower().replace("_", " ")
    return (
        f"a deadlock: {'; '.join(links[seen[rank] :])}. Let one of these ranks run what another needs before what it is"
        f" at ({need} is stage {need.stage_index}, {kind}, micro-batch {need.micro_index})."
    )
