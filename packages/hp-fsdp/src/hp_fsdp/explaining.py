"""What `explain` tells: groups, the order of a step, its time line, and memory by kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hp_dtensor.extend import text_table
from hp_fsdp.held import Held
from hp_fsdp.timeline import Timeline

__all__ = ["Event", "Explanation", "GroupFacts", "MemoryRow", "Overlap", "check_path", "simulate"]

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One group: what a call of `fully_shard` made.

    Attributes:
        name: the module's, from the root.
        parameters: how many.
        shard_bytes: of this rank's piece of the parameters, padding included.
        gathered_bytes: of the gathered buffers; 0 where the module computes with what the rank has.
        gradient_bytes: of the unsharded gradients' buffers.
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
    """What runs beside the computation.

    Attributes:
        gathers: the next group is gathered while one computes.
        reductions: a group's gradients are reduced while the next one computes.
    """

    gathers: bool = True
    reductions: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens in a step.

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
        predicted: from layouts, or from a forward without kernels; None where it is not known.
        measured: from the tensors that live, the last step, or the device; None where it is not known.
        remark: what a number leaves out, or why there is none.
    """

    kind: str
    predicted: int | None
    measured: int | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` gives; ``print`` it.

    Attributes:
        groups: in the order of modules.
        recorded: the order is that of the last step; False where there was none, and modules are taken in their order.
        events: one forward and one backward pass.
        memory: bytes on this rank, by kind.
        timeline: the times of the last forward and backward; None before there was one.
        held: the unsharded bytes over that time.
    """

    groups: tuple[GroupFacts, ...]
    recorded: bool
    events: tuple[Event, ...]
    memory: tuple[MemoryRow, ...]
    timeline: Timeline | None = None
    held: tuple[Held, ...] = ()

    def __str__(self) -> str:
        groups = [
            [g.name, str(g.parameters), _size(g.shard_bytes), _size(g.gathered_bytes), _when(g)] for g in self.groups
        ]
        events = [[e.phase, e.kind, e.group, _size(e.unsharded), _size(e.gradients)] for e in self.events]
        memory = [[row.kind, _size(row.predicted), _size(row.measured)] for row in self.memory]
        order = "as the last step ran" if self.recorded else "as modules are registered: no step was run yet"
        return "\n".join(
            [
                text_table(["group", "parameters", "shard", "gathered", "gathered when"], groups),
                f"One step, {order}:",
                text_table(["phase", "what", "group", "unsharded", "gradients"], events),
                *([] if self.timeline is None else ["Its times:", str(self.timeline)]),
                "Peak memory of this rank:",
                text_table(["kind", "predicted", "measured"], memory),
                *(f"{row.kind}: {row.remark}" for row in self.memory if row.remark),
            ]
        )

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the step for chrome://tracing or Perfetto: rows by kind, and a counter of unsharded bytes.

        Times are those of the last step, by the host's clock; see `hp_fsdp.timeline`. Before the first step events
        stand in their order, one microsecond each.

        Args:
            path: the file, JSON.
        """
        from hp_fsdp.tracing import write_trace

        write_trace(self, path)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the time line of the last step, and the unsharded bytes under it.

        Args:
            path: the file: .png, .svg or .pdf.

        Raises:
            ValueError: another suffix.
            RuntimeError: there was no step yet.
            ImportError: matplotlib isn't installed.
        """
        from hp_fsdp.picture import draw

        check_path(path, _PICTURES)
        if self.timeline is None:
            raise RuntimeError(
                f"explain: a picture needs the times of a step, and none was run yet. Run forward and backward first,"
                f" or write the order to a chrome trace (.json instead of {os.fspath(path)!r})"
            )
        draw(self.timeline, self.held, path)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a chrome trace (.json) or a picture (.png, .svg, .pdf), by the suffix of ``path``.

        Raises:
            ValueError: another suffix; and what `picture` raises.
        """
        if check_path(path) == ".json":
            self.chrome_trace(path)
        else:
            self.picture(path)


def check_path(path: str | os.PathLike[str], suffixes: Sequence[str] = (".json", *_PICTURES)) -> str:
    """The suffix of a file to write, in small letters.

    Args:
        path: the file.
        suffixes: those that can be written.

    Raises:
        ValueError: it is none of them.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in suffixes:
        raise ValueError(
            f"explain: expected a path that ends in {', '.join(suffixes)}, got {os.fspath(path)!r}: .json is a chrome"
            " trace, the others are pictures of the time line"
        )
    return suffix


def simulate(
    forward: Sequence[GroupFacts],
    backward: Sequence[GroupFacts],
    inside: Callable[[GroupFacts, GroupFacts], bool],
    overlap: Overlap = Overlap(),
) -> Iterable[Event]:
    """One step in order: a group is gathered before it runs, and freed when its pass is over.

    Args:
        forward: groups in the order in which their forwards began.
        backward: groups in the order in which their backwards began.
        inside: whether the first one's module is inside the second one's, so that it runs during the other's pass.
        overlap: what runs beside the computation.
    """
    held: dict[str, int] = {}
    gradients: dict[str, int] = {}

    def event(phase: str, kind: str, group: GroupFacts) -> Event:
        return Event(phase, kind, group.name, sum(held.values()), sum(gradients.values()))

    def gather(phase: str, group: GroupFacts) -> Iterable[Event]:
        kept = held.get(group.name, 0)
        if kept < group.gathered_bytes:  # what was kept for the gather among fewer ranks stays until it is freed
            held[group.name] = kept + group.gathered_bytes
            yield event(phase, "gather", group)

    def leave(phase: str, group: GroupFacts) -> Iterable[Event]:
        if phase == "backward":
            # A reduction that runs on behind the next group's backward keeps its buffer until the next one ends.
            gradients.clear()
            gradients[group.name] = group.gradient_bytes
        stays = group.after_forward if phase == "forward" else group.after_backward
        if held.get(group.name, 0) != stays:
            held[group.name] = stays
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
