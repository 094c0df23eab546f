"""From the groups of a sharded model to an `Explanation`, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_fsdp.explaining import Event, Explanation, GroupFacts, MemoryRow, Overlap, simulate
from hp_fsdp.held import Held, replay
from hp_fsdp.sharded_class import group_of
from hp_fsdp.timeline import Moment, timeline_of

__all__ = ["BucketBytes", "Groups", "activation_row", "explained", "optimizer_row", "outermost", "unsharded_rows"]

Rows = Callable[[Sequence[Event], Sequence[Held]], Sequence[MemoryRow]]


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """Bytes of one bucket of a group.

    Attributes:
        shard: this rank's piece.
        gathered: the gathered buffer; 0 where the module computes with what the rank has.
        gradients: the unsharded gradients' buffer; 0 where none is made.
    """

    shard: int
    gathered: int
    gradients: int


@dataclass(frozen=True, slots=True)
class Groups:
    """A sharded model as a framework's module tree has it.

    Attributes:
        root: the model's own group.
        all: its groups, the root's first.
        names: of all modules, by their ids.
        inside: a module and all inside it.
        bytes_of: of a bucket.
        keeps: whether a group stays gathered after a backward pass.
        overlap: what runs beside the computation.
    """

    root: Any
    all: Sequence[Any]
    names: Mapping[int, str]
    inside: Callable[[Any], Iterable[Any]]
    bytes_of: Callable[[Any], BucketBytes]
    keeps: Callable[[Any], bool]
    overlap: Overlap


def explained(groups: Groups, rows: Rows) -> Explanation:
    """Puts together what groups hold and do in a step.

    Args:
        groups: the model.
        rows: memory by kind, of the events of a step and what the last one held.
    """
    root, every = groups.root, list(groups.all)
    facts = {id(group): _facts(group, groups) for group in every}
    context = root.context
    order, backward_order = root.order, root.order if context is None else context.backward_order
    forward = [group for group in order.now or order.last if id(group) in facts]
    backward = [group for group in backward_order.now or backward_order.last if id(group) in facts]
    recorded = bool(forward)
    forward = forward or every
    backward = backward or [root, *reversed([group for group in forward if group is not root])]
    inner = {facts[id(group)].name: {id(module) for module in groups.inside(group.module)} for group in every}
    modules = {facts[id(group)].name: id(group.module) for group in every}
    events = tuple(
        simulate(
            [facts[id(group)] for group in forward],
            [facts[id(group)] for group in backward],
            lambda one, other: one is not other and modules[one.name] in inner[other.name],
            groups.overlap,
        )
    )
    moments: list[Moment] = [
        (kind, facts[id(group)].name if id(group) in facts else None, when)
        for kind, group, when in (() if context is None else context.last_moments)
    ]
    accumulating = {facts[id(group)].name for group in every if not group.reduces}
    told = tuple(facts.values())
    held = replay(moments, told, accumulating=accumulating) if moments else ()
    timeline = timeline_of(moments) if moments else None
    return Explanation(told, recorded, events, tuple(rows(events, held)), timeline, held)


def _facts(group: Any, groups: Groups) -> GroupFacts:
    sizes = [groups.bytes_of(bucket) for bucket in group.buckets]
    gathered = sum(size.gathered for size in sizes)
    is_root = group is groups.root
    frees = group.reshard_after_forward or (group.reshard_after_forward is None and not is_root)
    ranks = group.near.size if group.near is not None else 0
    return GroupFacts(
        name=groups.names[id(group.module)] or type(group.module).__name__,
        parameters=len(group.parameters),
        shard_bytes=sum(size.shard for size in sizes),
        gathered_bytes=gathered,
        gradient_bytes=sum(size.gradients for size in sizes),
        after_forward=(gathered // ranks if ranks else 0) if frees else gathered,
        after_backward=gathered if groups.keeps(group) else 0,
    )


def outermost(model: Any) -> Any:
    """Return the group of the model; raise ValueError if it is not sharded, or inside of a sharded module that ran.

    Args:
        model: as given to ``explain``.
    """
    group = group_of(model)
    context = getattr(group, "context", None)
    if group is None or (context is not None and context.root is not group):
        why = "is inside another sharded module" if group else "was not given to fully_shard"
        raise ValueError(f"explain: this {type(model).__name__} {why}, call explain on the root")
    return group


# ---- memory ----
def unsharded_rows(
    groups: Sequence[Any], events: Sequence[Event], held: Sequence[Held], *, remark: str = "", buffers: str = ""
) -> list[MemoryRow]:
    """The rows of unsharded parameters and gradients.

    Args:
        groups: of the model.
        events: of a step, predicted.
        held: unsharded bytes over the last step; empty before it.
        remark: what the prediction of parameters leaves out.
        buffers: what the bytes of gradients are.
    """
    missing = "" if held else "not measured, no forward and backward was run yet"
    apart = [group.name for group in groups if group.deterministic]
    parameters = max((each.parameters for each in held), default=None)
    gradients = max((each.gradients for each in held), default=None)
    most = max((event.gradients for event in events), default=0)
    if apart:
        kept = f"not known with deterministic=True ({apart[0]}): a rank keeps those of each of its micro-batches"
        most_gradients = MemoryRow("unsharded gradients", None, None, kept)
    else:
        most_gradients = MemoryRow("unsharded gradients", most, gradients, missing or buffers)
    unsharded = max((event.unsharded for event in events), default=0)
    told = "; ".join(filter(None, (missing, remark)))
    return [MemoryRow("unsharded parameters", unsharded, parameters, told), most_gradients]


def activation_row(predicted: Any, measured: Any) -> MemoryRow:
    """The row of activations.

    Args:
        predicted: what a forward without kernels saved, if it ran.
        measured: what `watch_activations` saw, if it watched.
    """
    if predicted is None and measured is None:
        remark = "predicted with inputs=, measured with activations= of watch_activations(model)"
    else:
        remark = "kept of the model's forward; not what checkpointed blocks compute anew, nor what the loss keeps"
    uncounted = sum(each.uncounted for each in (predicted, measured) if each is not None)
    if uncounted:
        remark += f"; {uncounted} tensors without a storage of their own were not counted"
    return MemoryRow(
        "activations",
        None if predicted is None else predicted.peak,
        None if measured is None else measured.peak,
        remark,
    )


def optimizer_row(optimizer: Any, predicted: int | None, measured: int | None, known: str) -> MemoryRow:
    """The row of optimizer states.

    Args:
        optimizer: whose, or None.
        predicted: bytes; None where they are not known.
        measured: bytes; None where it has no states yet.
        known: the optimizers that are predicted, for the remark.
    """
    if optimizer is None:
        return MemoryRow("optimizer", None, None, "give optimizer= to count its states")
    strange = f"not predicted, {type(optimizer).__name__} is none of {known}" if predicted is None else ""
    unstepped = "not measured, it made no step yet" if measured is None else ""
    return MemoryRow("optimizer", predicted, measured, "; ".join(filter(None, (strange, unstepped))))
