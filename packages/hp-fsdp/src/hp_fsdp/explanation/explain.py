"""explain: groups of a sharded model, a step's events and time line as text, picture or trace, and memory by kind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hp_dtensor.extend import text_table
from hp_fsdp import port
from hp_fsdp.explanation.memory import (
    DryRank,
    Event,
    GroupFacts,
    MemoryPoint,
    MemoryRow,
    memory_timeline,
    simulate,
    with_dry_run,
)
from hp_fsdp.explanation.timeline import Span, Timeline, TraceEvent, timeline_of
from hp_fsdp.groups.managed_params import group_of, groups_in

PICTURES = (".png", ".svg", ".pdf")
_WIDTH = 11.0  # inches
_ROW = 0.28
_MEMORY = 1.8
_MARGINS = 1.4
# Kind, colour, and which part of a group's row it takes: (bottom, height), of 1.
_DRAWN = {
    "compute": ("#7fb069", (0.0, 0.6)),
    "gather": ("#8ecae6", (0.6, 0.3)),
    "reduce": ("#f4a261", (0.6, 0.3)),
    "wait": ("#d62828", (0.0, 0.9)),
}


def draw(timeline: Timeline, memory: Sequence[MemoryPoint], path: str | os.PathLike[str]) -> None:
    """Draw one row for each group, and the bytes of gathered parameters and unsharded gradients under them.

    Args:
        timeline: the times.
        memory: the bytes.
        path: the file; its suffix sets the format.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture of a step needs matplotlib: pip install 'hp-fsdp[plot]'") from error
    groups = list(dict.fromkeys(span.group for span in timeline.spans))
    height = _ROW * max(1, len(groups))
    figure = Figure(figsize=(_WIDTH, height + _MEMORY + _MARGINS), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(height, _MEMORY))
    _draw_groups(above, timeline, groups)
    _draw_memory(below, timeline, memory)
    figure.suptitle(timeline.summary, fontsize=9)
    figure.savefig(path)


def _draw_groups(axes: Any, timeline: Timeline, groups: Sequence[str]) -> None:
    for kind, (colour, (bottom, height)) in _DRAWN.items():
        for row, group in enumerate(groups):
            spans = [span for span in timeline.spans if (span.kind, span.group) == (kind, group)]
            bars = [(span.start * 1e3, span.seconds * 1e3) for span in spans]
            label = kind if row == 0 else None
            axes.broken_barh(bars, (row + 0.05 + bottom, height), facecolors=colour, label=label, linewidth=0)
    if timeline.backward is not None:
        axes.axvline(timeline.backward * 1e3, color="black", linewidth=0.8, linestyle="--")
    axes.set(ylim=(len(groups), 0), xlim=(0, timeline.seconds * 1e3 or None))
    axes.set_yticks([row + 0.5 for row in range(len(groups))], groups)
    axes.tick_params(labelsize=7)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_DRAWN), fontsize=7, frameon=False)


def _draw_memory(axes: Any, timeline: Timeline, memory: Sequence[MemoryPoint]) -> None:
    times = [0.0, *(each.at * 1e3 for each in memory), timeline.seconds * 1e3]
    for values, label in (
        ([each.parameters for each in memory], "unsharded parameters"),
        ([each.gradients for each in memory], "unsharded gradients"),
    ):
        sizes = [value / 2**20 for value in (0, *values)]
        axes.step(times, [*sizes, sizes[-1]], where="post", label=label, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)


Entry = dict[str, object]


def write_trace(
    events: Sequence[Event], timeline: Timeline | None, memory: Sequence[MemoryPoint], path: str | os.PathLike[str]
) -> None:
    """Write the times of the last step, or the order of a step if none has run.

    Args:
        events: the predicted order.
        timeline: the times, if there are any.
        memory: the bytes over these times.
        path: the file, JSON.
    """
    if timeline is None:
        entries = _order(events)
    else:
        entries = [*_times(timeline), *(_counter(each.at, each.parameters, each.gradients) for each in memory)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": entries, "displayTimeUnit": "ms"}, file)


def _order(events: Sequence[Event]) -> list[Entry]:
    rows = {kind: number for number, kind in enumerate(("run", "gather", "reduce", "free"))}
    entries = [_row(kind, number) for kind, number in rows.items()]
    for at, event in enumerate(events):
        entry = {"name": event.group, "cat": event.phase, "pid": 0, "tid": rows[event.kind], "ts": at}
        entries.append({**entry, "ph": "X", "dur": 1, "args": asdict(event)})
        entries.append(_counter(at * 1e-6, event.unsharded, event.gradients))
    return entries


def _times(timeline: Timeline) -> Iterable[Entry]:
    """Yield spans by kind; spans that overlap without nesting, as gathers do, go to rows of their own."""
    rows = 0
    for kind in ("compute", "wait", "gather", "reduce"):
        for lane in _lanes([span for span in timeline.spans if span.kind == kind]):
            yield _row(kind, rows)
            for span in lane:
                entry = {"name": span.group, "cat": span.phase, "pid": 0, "tid": rows, "ph": "X"}
                yield {**entry, "ts": span.start * 1e6, "dur": span.seconds * 1e6, "args": {"kind": kind}}
            rows += 1


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Put spans on as few rows as possible; on each row a span ends before the next begins, or contains it."""
    lanes: list[list[Span]] = []
    for span in spans:
        for lane in lanes:
            if all(other.stop <= span.start or span.stop <= other.stop for other in lane):
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _row(name: str, number: int) -> Entry:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}


def _counter(at: float, parameters: int, gradients: int) -> Entry:
    counts = {"parameters": parameters, "gradients": gradients}
    return {"name": "unsharded bytes", "ph": "C", "pid": 0, "ts": at * 1e6, "args": counts}


def check_path(path: str | os.PathLike[str], suffixes: Sequence[str] = (".json", *PICTURES)) -> str:
    """Return the suffix of a file to write, in lower case.

    Args:
        path: the file.
        suffixes: the supported ones.

    Raises:
        ValueError: another suffix.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in suffixes:
        raise ValueError(
            f"explain: expected a path that ends in {', '.join(suffixes)}, got {os.fspath(path)!r}: .json is a chrome"
            " trace, the others are pictures of the time line"
        )
    return suffix


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `explain`; ``print`` it.

    Attributes:
        groups: in the order of modules.
        recorded: True if the order is that of the last step; False before the first step, when modules are taken in the
            order of their registration.
        events: one forward and one backward pass, predicted.
        memory: bytes on this rank, by kind.
        timeline: times of the last forward and backward; None before the first.
        memory_timeline: unsharded bytes over the same time.
    """

    groups: tuple[GroupFacts, ...]
    recorded: bool
    events: tuple[Event, ...]
    memory: tuple[MemoryRow, ...]
    timeline: Timeline | None = None
    memory_timeline: tuple[MemoryPoint, ...] = ()

    def __str__(self) -> str:
        groups = [
            [g.name, str(g.parameters), _size(g.shard_bytes), _size(g.gathered_bytes), _when(g)] for g in self.groups
        ]
        events = [[e.phase, e.kind, e.group, _size(e.unsharded), _size(e.gradients)] for e in self.events]
        heads = ["kind", "predicted", "measured"]
        memory = [[row.kind, _size(row.predicted), _size(row.measured)] for row in self.memory]
        if any(row.dry_run is not None for row in self.memory):
            heads.append("dry run")
            memory = [[*cells, _size(row.dry_run)] for cells, row in zip(memory, self.memory, strict=True)]
        order = "as the last step ran" if self.recorded else "as modules are registered: no step was run yet"
        return "\n".join(
            [
                text_table(["group", "parameters", "shard", "gathered", "gathered when"], groups),
                f"One step, {order}:",
                text_table(["phase", "what", "group", "unsharded", "gradients"], events),
                *([] if self.timeline is None else ["Its times:", str(self.timeline)]),
                "Peak memory of this rank:",
                text_table(heads, memory),
                *(f"{row.kind}: {row.remark}" for row in self.memory if row.remark),
            ]
        )

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the step for chrome://tracing or Perfetto: one row for each kind of work, and a counter of bytes.

        Times are those of the last step, by the host's clock; see `hp_fsdp.explanation.timeline`. Before the first step
        the predicted events are written in order, one microsecond each.

        Args:
            path: the file, JSON.
        """
        write_trace(self.events, self.timeline, self.memory_timeline, path)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the time line of the last step, and the unsharded bytes under it.

        Args:
            path: the file: .png, .svg or .pdf.

        Raises:
            ValueError: another suffix.
            RuntimeError: no step has run yet.
            ImportError: matplotlib isn't installed.
        """
        check_path(path, PICTURES)
        if self.timeline is None:
            raise RuntimeError(
                f"explain: a picture needs the times of a step, and none was run yet. Run forward and backward first,"
                f" or write the order to a chrome trace (.json instead of {os.fspath(path)!r})"
            )
        draw(self.timeline, self.memory_timeline, path)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a chrome trace (.json) or a picture (.png, .svg, .pdf), by the suffix of ``path``.

        Raises:
            ValueError: another suffix.
            RuntimeError, ImportError: see `picture`.
        """
        if check_path(path) == ".json":
            self.chrome_trace(path)
        else:
            self.picture(path)


def explain(
    model: Any,
    *,
    optimizer: Any = None,
    inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    activations: Any = None,
    dry_run: DryRank | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Describe the groups of a model, the events of a step in order, and the memory they take, by kind.

    Nothing is communicated. The order is that of the last step, or of the modules before the first one; gathers are
    listed where they start, ahead of time, as in every step but the first. Times are those of the last forward and
    backward, by the host's clock; see `hp_fsdp.explanation.timeline`.

    Example:
        >>> with watch_activations(model) as activations:
        ...     loss_of(model(x)).backward()
        >>> print(explain(model, optimizer=optimizer, inputs=(x,), activations=activations, path="step.png"))

    Args:
        model: a sharded module, with all its sharded modules inside.
        optimizer: counts its states.
        inputs: the arguments of the model's forward on one rank: positional ones as a tuple, or keyword arguments by
            name. Predicts the activations by a forward without kernels, see `hp_fsdp.torch.explain`.
            PyTorch only.
            Default: no prediction.
        activations: the result of `watch_activations`. PyTorch only. Default: not measured.
        dry_run: this rank's report of a dry run, `hp_plan.dry_run(plan, rank=rank, memory=True).ranks[0]`, to be shown
            beside what is measured. Default: none.
        path: file to write the step to: a chrome trace (.json), or a picture of the time line (.png, .svg, .pdf).
            Default: none.

    Raises:
        ValueError: ``model`` is not sharded itself, ``path`` has another suffix, or ``dry_run`` no memory over
            the step.
        TypeError: ``inputs`` is neither a tuple nor a dict.
        NotImplementedError: activations of this model cannot be predicted: it has tensor parallel parameters, compiled
            modules, or communicates in forward; or groups of several modules. On MindSpore, ``inputs`` or
            ``activations``: it has no tensors without values and no hooks for saved tensors.
        RuntimeError: the forward depends on values; or a picture is requested before the first step.
        ImportError: a picture is requested and matplotlib isn't installed.
    """
    root = _outermost(model)
    if path is not None:
        check_path(path)
    framework = port.explaining()
    predicted = framework.predicted_activations(model, inputs, activations)
    names = {id(module): name for name, module in framework.named_modules(model)}
    groups = groups_in(module for _, module in framework.named_modules(model))
    for group in groups:
        if len(group.members) > 1:
            raise NotImplementedError(
                f"explain: {group.class_name} are one group, and when it is gathered and freed depends on the order of"
                " their calls, which is not predicted. Measure memory with watch_activations"
            )
    facts = {id(group): _facts(group, root, names, framework) for group in groups}
    recorded, forward, backward = _orders(root, groups, facts)
    inner = {
        facts[id(group)].name: {id(module) for _, module in framework.named_modules(group.module)} for group in groups
    }
    modules = {facts[id(group)].name: id(group.module) for group in groups}
    events = tuple(
        simulate(
            [facts[id(group)] for group in forward],
            [facts[id(group)] for group in backward],
            lambda one, other: one is not other and modules[one.name] in inner[other.name],
            framework.overlap(root),
        )
    )
    trace: list[TraceEvent] = [
        (kind, facts[id(group)].name if id(group) in facts else None, when)
        for kind, group, when in (() if root.context is None else root.context.last_trace)
    ]
    accumulating = {facts[id(group)].name for group in groups if not group.reduces}
    memory = memory_timeline(trace, tuple(facts.values()), accumulating=accumulating) if trace else ()
    rows = framework.memory_rows(groups, events, memory, optimizer, predicted, activations)
    rows = rows if dry_run is None else with_dry_run(rows, dry_run)
    timeline = timeline_of(trace) if trace else None
    explanation = Explanation(tuple(facts.values()), recorded, events, tuple(rows), timeline, memory)
    if path is not None:
        explanation.write(path)
    return explanation


def _outermost(model: Any) -> Any:
    """Return the group of the model; raise ValueError if it is not sharded, or inside of a sharded module that ran."""
    group = group_of(model)
    context = getattr(group, "context", None)
    if group is None or (context is not None and context.root is not group):
        why = "is inside another sharded module" if group else "was not given to fully_shard"
        raise ValueError(f"explain: this {type(model).__name__} {why}, call explain on the root")
    return group


def _orders(root: Any, groups: Sequence[Any], facts: Mapping[int, Any]) -> tuple[bool, Sequence[Any], Sequence[Any]]:
    """Return whether a step was recorded, and the groups in the order of forward and of backward."""

    def recorded(order: Any) -> list[Any]:
        return [group for group in order.now or order.last if id(group) in facts]

    context = root.context
    forward, backward = recorded(root.order), recorded(root.order if context is None else context.backward_order)
    in_order = forward or groups
    return bool(forward), in_order, backward or [root, *reversed([group for group in in_order if group is not root])]


def _facts(group: Any, root: Any, names: Mapping[int, str], framework: port.Explaining) -> GroupFacts:
    sizes = [framework.bytes_of(bucket) for bucket in group.buckets]
    gathered = sum(size.gathered for size in sizes)
    frees = group.reshard_after_forward or (group.reshard_after_forward is None and group is not root)
    ranks = 0 if group.post_forward_ranks is None else group.post_forward_ranks.size
    return GroupFacts(
        name=names[id(group.module)] or type(group.module).__name__,
        parameters=len(group.parameters),
        shard_bytes=sum(size.shard for size in sizes),
        gathered_bytes=gathered,
        gradient_bytes=sum(size.gradients for size in sizes),
        after_forward=(gathered // ranks if ranks else 0) if frees else gathered,
        after_backward=gathered if framework.stays_gathered(group) else 0,
    )


def _when(group: GroupFacts) -> str:
    if not group.gathered_bytes:
        return "never: this rank has all"
    if group.after_backward:
        return "forward, once a step"
    return "forward" if group.after_forward == group.gathered_bytes else "forward, backward"


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
