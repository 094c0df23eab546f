"""Memory of a sharded model: by kind, and over one step, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hp_fsdp.explanation.timeline import TraceEvent, last_reductions


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """Bytes of one bucket of a group.

    Attributes:
        shard: this rank's shard, padding included.
        gathered: the gathered buffer; 0 if the module computes with the shard itself.
        gradients: the unsharded gradients' buffer; 0 if there is none.
    """

    shard: int
    gathered: int
    gradients: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Sizes of one group, made by one call of `fully_shard`.

    Attributes:
        name: the module's, from the root.
        parameters: number of parameters.
        shard_bytes: this rank's shards, padding included.
        gathered_bytes: the gathered buffers; 0 if the module computes with the shards themselves.
        gradient_bytes: the unsharded gradients' buffers.
        after_forward: bytes that stay gathered between forward and backward.
        after_backward: bytes that stay gathered after backward.
    """

    name: str
    parameters: int
    shard_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    after_forward: int
    after_backward: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication that runs beside the computation.

    Attributes:
        gathers: the next group is gathered while one computes.
        reductions: a group's gradients are reduced while the next one computes.
    """

    gathers: bool = True
    reductions: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a step.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        kind: ``"gather"``, ``"run"``, ``"free"`` or ``"reduce"``.
        group: the group's name.
        unsharded: bytes of gathered parameters after it.
        gradients: bytes of unsharded gradients after it.
    """

    phase: str
    kind: str
    group: str
    unsharded: int
    gradients: int


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one kind on this rank.

    Attributes:
        kind: parameters, gradients, optimizer, unsharded parameters, unsharded gradients, activations, device peak.
        predicted: from layouts, or from a forward without kernels; None if unknown.
        measured: from the live tensors, the last step, or the device; None if unknown.
        remark: a limit of the numbers, or the reason why there is none.
        dry_run: what a dry run says; None without one, or of a kind that it does not tell apart.
    """

    kind: str
    predicted: int | None
    measured: int | None
    remark: str = ""
    dry_run: int | None = None


class DryRank(Protocol):
    """A rank of a dry run, such as `hp_plan.dry_run(plan, rank=0, memory=True).ranks[0]`."""

    @property
    def memory(self) -> Mapping[str, Sequence[int]]:
        """Bytes of each kind at each operation of a step."""
        ...

    @property
    def peak(self) -> Any:
        """The moment at which the memory is largest, with `live` bytes."""
        ...


def simulate(
    forward: Sequence[GroupFacts],
    backward: Sequence[GroupFacts],
    inside: Callable[[GroupFacts, GroupFacts], bool],
    overlap: Overlap = Overlap(),
) -> Iterable[Event]:
    """Yield the events of one step: a group is gathered before it runs, and freed when its pass is over.

    Args:
        forward: groups in the order in which their forwards began.
        backward: groups in the order in which their backwards began.
        inside: tells if the first group's module is inside the second one's, and so runs during the other's pass.
        overlap: communication beside the computation.
    """
    gathered: dict[str, int] = {}
    gradients: dict[str, int] = {}

    def event(phase: str, kind: str, group: GroupFacts) -> Event:
        return Event(phase, kind, group.name, sum(gathered.values()), sum(gradients.values()))

    def gather(phase: str, group: GroupFacts) -> Iterable[Event]:
        post_forward = gathered.get(group.name, 0)
        if post_forward < group.gathered_bytes:  # the post-forward shard stays until the group is freed
            gathered[group.name] = post_forward + group.gathered_bytes
            yield event(phase, "gather", group)

    def leave(phase: str, group: GroupFacts) -> Iterable[Event]:
        if phase == "backward":
            # A reduction that runs on behind the next group's backward keeps its buffer until the next one ends.
            gradients.clear()
            gradients[group.name] = group.gradient_bytes
        stays = group.after_forward if phase == "forward" else group.after_backward
        if gathered.get(group.name, 0) != stays:
            gathered[group.name] = stays
            yield event(phase, "free", group)
        if phase == "backward" and group.gradient_bytes:
            yield event(phase, "reduce", group)
            if not overlap.reductions:
                gradients.clear()

    for phase, order in (("forward", forward), ("backward", backward)):
        open_: list[GroupFacts] = []
        for at, group in enumerate(order):
            while open_ and not inside(group, open_[-1]):
                yield from leave(phase, open_.pop())
            yield from gather(phase, group)
            if overlap.gathers and at + 1 < len(order):
                yield from gather(phase, order[at + 1])
            yield event(phase, "run", group)
            open_.append(group)
        while open_:
            yield from leave(phase, open_.pop())


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Unsharded memory of this rank from ``at`` until the next point.

    Attributes:
        at: seconds from the beginning of the step.
        parameters: bytes of gathered parameters, post-forward shards included.
        gradients: bytes of unsharded gradients' buffers.
        groups: names of the groups that were gathered, in the order of the gathers.
    """

    at: float
    parameters: int
    gradients: int
    groups: tuple[str, ...]


def memory_timeline(
    trace: Sequence[TraceEvent], groups: Sequence[GroupFacts], *, accumulating: Collection[str] = ()
) -> tuple[MemoryPoint, ...]:
    """Return the unsharded memory after each event of a step that changed it.

    A group that computes or is freed without a gather before was gathered when the step began.

    Args:
        trace: events of one pass, in order.
        groups: their sizes.
        accumulating: names of groups that keep their unsharded gradients because they don't reduce them yet.
    """
    facts = {group.name: group for group in groups}
    firsts: dict[str, str] = {}
    for kind, name, _ in trace:
        if name in facts and kind in ("gather", "run", "free"):
            firsts.setdefault(name, kind)
    gathered = {name: facts[name].gathered_bytes for name, kind in firsts.items() if kind != "gather"}
    post_forward: dict[str, int] = {}
    gradients: dict[str, int] = {}
    ran: set[str] = set()
    forward = True
    points: list[MemoryPoint] = []

    def point(now: int) -> MemoryPoint:
        return MemoryPoint(
            at=(now - trace[0][2]) * 1e-9,
            parameters=sum(gathered.values()) + sum(post_forward.values()),
            gradients=sum(gradients.values()),
            groups=tuple(name for name, size in gathered.items() if size),
        )

    if gathered:
        points.append(point(trace[0][2]))
    complete = last_reductions(trace)
    for index, (kind, name, now) in enumerate(trace):
        forward = forward and kind != "backward"
        if name not in facts:
            continue
        group = facts[name]
        if kind == "gather":
            gathered[name] = group.gathered_bytes
        elif kind == "free":
            gathered.pop(name, None)
            post_forward.pop(name, None)
            if forward and name in ran and group.after_forward < group.gathered_bytes:
                post_forward[name] = group.after_forward
        elif kind == "reduce" or (kind == "left" and not forward and name in accumulating):
            gradients[name] = group.gradient_bytes
        elif index in complete:
            gradients.pop(name, None)
        elif kind == "run" and forward:
            ran.add(name)
            continue
        else:
            continue
        points.append(point(now))
    return tuple(points)


# ---- memory by kind ----
DEVICE_PEAK = "device peak, of all kinds"
# "gathered" has more than unsharded parameters: it is of all buffers that are resized.
_DRY_KINDS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "states",
    "activations": "saved",
}


def with_dry_run(rows: Sequence[MemoryRow], rank: DryRank) -> list[MemoryRow]:
    """Return the rows with what a dry run says: the most of each kind in a step, and the peak of all.

    Args:
        rows: one for each kind.
        rank: this rank's report.

    Raises:
        ValueError: it has no memory over the step.
    """
    if not rank.memory:
        raise ValueError("explain: the dry run has no memory over the step: dry_run(plan, rank=0, memory=True)")
    most = {kind: max(rank.memory[theirs], default=0) for kind, theirs in _DRY_KINDS.items()}
    found = [replace(row, dry_run=most.get(row.kind)) for row in rows if row.kind != DEVICE_PEAK]
    measured = next((row.measured for row in rows if row.kind == DEVICE_PEAK), None)
    return [*found, MemoryRow(DEVICE_PEAK, None, measured, dry_run=rank.peak.live)]


def unsharded_rows(
    groups: Sequence[Any],
    events: Sequence[Event],
    memory: Sequence[MemoryPoint],
    *,
    remark: str = "",
    buffers: str = "",
) -> list[MemoryRow]:
    """Return the rows of unsharded parameters and gradients.

    Args:
        groups: the model's.
        events: of a step, predicted.
        memory: unsharded bytes over the last step; empty before it.
        remark: limits of the prediction of parameters.
        buffers: the buffers that the bytes of gradients stand for.
    """
    missing = "" if memory else "not measured, no forward and backward was run yet"
    deterministic = [group.name for group in groups if group.deterministic]
    parameters = max((each.parameters for each in memory), default=None)
    gradients = max((each.gradients for each in memory), default=None)
    most = max((event.gradients for event in events), default=0)
    if deterministic:
        why = f"not known with deterministic=True ({deterministic[0]}): a rank keeps those of each of its micro-batches"
        most_gradients = MemoryRow("unsharded gradients", None, None, why)
    else:
        most_gradients = MemoryRow("unsharded gradients", most, gradients, missing or buffers)
    unsharded = max((event.unsharded for event in events), default=0)
    remarks = "; ".join(filter(None, (missing, remark)))
    return [MemoryRow("unsharded parameters", unsharded, parameters, remarks), most_gradients]


def activation_row(predicted: Any, measured: Any) -> MemoryRow:
    """Return the row of activations.

    Args:
        predicted: counts of a forward without kernels, if it ran.
        measured: the result of `watch_activations`, if there is one.
    """
    if predicted is None and measured is None:
        remark = "predicted with inputs=, measured with activations= of watch_activations(model)"
    else:
        remark = "saved in the model's forward; without tensors that checkpointed blocks recompute or the loss saves"
    uncounted = sum(each.uncounted for each in (predicted, measured) if each is not None)
    if uncounted:
        remark += f"; {uncounted} tensors without a storage of their own were not counted"
    return MemoryRow(
        "activations",
        None if predicted is None else predicted.peak,
        None if measured is None else measured.peak,
        remark,
    )


def optimizer_row(optimizer: Any, predicted: int | None, measured: int | None, supported: str) -> MemoryRow:
    """Return the row of optimizer states.

    Args:
        optimizer: the optimizer, or None.
        predicted: bytes; None if unknown.
        measured: bytes; None if it has no states yet.
        supported: the optimizers that are predicted, for the remark.
    """
    if optimizer is None:
        return MemoryRow("optimizer", None, None, "give optimizer= to count its states")
    unsupported = f"not predicted, {type(optimizer).__name__} is not one of {supported}" if predicted is None else ""
    unstepped = "not measured, it made no step yet" if measured is None else ""
    return MemoryRow("optimizer", predicted, measured, "; ".join(filter(None, (unsupported, unstepped))))
