"""Timeline: events of the groups of a model in one step, and their times, from the trace of the step.

Note [Whose clock]
    Trace events have times of the host's clock. On CPU, with gloo, these are the times at which things happened. On
    devices they are the times at which the host issued work, or was blocked itself: kernels and collectives run later,
    and a wait blocks the device's stream, not the host. For the device's own clock use torch.profiler, with the ranges
    ``hp.fsdp.all_gather(<group>)``, ``hp.fsdp.wait_all_gather(<group>)`` and ``hp.fsdp.reduce_scatter(<group>)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TraceEvent = tuple[str, str | None, int]
"""Kind, name of the group if the event belongs to one, and nanoseconds of a clock."""

KINDS = ("gather", "wait", "run", "left", "free", "reduce", "reduced", "backward", "end")
"""Kinds of trace events: a group's gather was issued, it is waited for, the module computes, its forward or backward is
over, its gathered parameters are freed, its reduction was issued, its sharded gradients are ready; the backward pass
begins, it ends."""

_NAME = 28
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time of one kind.

    Attributes:
        phase: ``"forward"`` or ``"backward"``, at its beginning.
        kind: ``"compute"`` (the group's module, including the modules inside it), ``"gather"`` and
            ``"reduce"`` (under way, from its issue until it was seen to be done, waits included) or ``"wait"``.
        group: the group's name.
        start: seconds from the beginning of the step.
        seconds: its length.
    """

    phase: str
    kind: str
    group: str
    start: float
    seconds: float

    @property
    def stop(self) -> float:
        """End of the span, in seconds from the beginning of the step."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """One forward and backward pass by the host's clock, see Note [Whose clock]; ``print`` it for a chart.

    Attributes:
        spans: in the order in which they began.
        seconds: from the first event to the last; the optimizer's step is not in it.
        backward: beginning of the backward pass, in seconds; None if there was none.
        computing: seconds in which a module computed and nothing was waited for. Work between modules, such as the
            loss, is in neither.
        waiting_for_gathers: seconds of waits for parameters: communication that nothing hid.
        waiting_for_reductions: the same for gradients.
        overlapped: share, 0 to 1, of the time that gathers and reductions were under way in which nobody waited for
            them. One that ended before anybody asked counts until then, so this is an upper bound. None if none took
            any time.
    """

    spans: tuple[Span, ...]
    seconds: float
    backward: float | None
    computing: float
    waiting_for_gathers: float
    waiting_for_reductions: float
    overlapped: float | None

    @property
    def summary(self) -> str:
        """The totals in one line."""
        total, computing = duration(self.seconds), duration(self.computing)
        gathers, reductions = duration(self.waiting_for_gathers), duration(self.waiting_for_reductions)
        share = "" if self.overlapped is None else f"; {self.overlapped:.0%} of communication behind computation"
        waits = f"waiting for gathers {gathers}, for reductions {reductions}"
        return f"{total} by the host's clock: computing {computing}, {waits}{share}"

    def __str__(self) -> str:
        legend = "# computes   - a module inside it does   w waits   g gather under way   r reduction under way"
        return "\n".join([*_chart(self), legend, self.summary])


def timeline_of(trace: Sequence[TraceEvent]) -> Timeline:
    """Combine trace events into spans, and sum them up.

    Example:
        >>> ms = 1_000_000
        >>> timeline = timeline_of(
        ...     [("gather", "a", 0), ("wait", "a", 1 * ms), ("run", "a", 3 * ms), ("left", "a", 9 * ms)]
        ... )
        >>> [(span.kind, round(span.start, 6), round(span.seconds, 6)) for span in timeline.spans]
        [('gather', 0.0, 0.003), ('wait', 0.001, 0.002), ('compute', 0.003, 0.006)]

    Args:
        trace: events of one pass, in order. A wait for a reduction begins with the event before its ``"reduced"``.

    Raises:
        ValueError: an empty trace, or an unknown kind.
    """
    if not trace:
        raise ValueError("timeline_of: expected the trace of a step, got none")
    began, ended = trace[0][2], trace[-1][2]
    gathering, reducing = _Spans("gather", began), _Spans("reduce", began)
    computing, waiting, draining = _Spans("compute", began), _Spans("wait", began), _Spans("wait", began)
    phase, backward, before = "forward", None, began
    complete = last_reductions(trace)
    for index, (kind, group, now) in enumerate(trace):
        name = group or ""
        if kind == "backward":
            phase, backward = "backward", (now - began) * 1e-9
        elif kind in ("gather", "reduce"):
            (gathering if kind == "gather" else reducing).open(phase, name, now)
        elif kind == "wait":
            waiting.open(phase, name, now)
        elif kind == "run":
            waiting.close(name, now)
            gathering.close(name, now)
            computing.open(phase, name, now)
        elif kind == "left":
            computing.close(name, now)
        elif kind == "free":  # gathered ahead of time and not used
            waiting.close(name, now)
            gathering.close(name, now)
        elif kind == "reduced":
            if index in complete and not reducing.close(name, now):  # issued by the micro-batch before this one
                reducing.open(phase, name, began)
                reducing.close(name, now)
            draining.open(phase, name, before)
            draining.close(name, now)
        elif kind != "end":
            raise ValueError(f"timeline_of: expected one of {', '.join(KINDS)}, got {kind!r} of {group!r}")
        before = now
    every = (gathering, reducing, computing, waiting, draining)
    for spans in every:
        spans.close_all(ended)
    waits = [*waiting.done, *draining.done]
    under_way = sum(span.seconds for span in (*gathering.done, *reducing.done))
    exposed = sum(span.seconds for span in waits)
    return Timeline(
        spans=tuple(
            sorted((span for spans in every for span in spans.done), key=lambda span: (span.start, -span.stop))
        ),
        seconds=(ended - began) * 1e-9,
        backward=backward,
        computing=_covered([*computing.done, *waits]) - _covered(waits),
        waiting_for_gathers=sum(span.seconds for span in waiting.done),
        waiting_for_reductions=sum(span.seconds for span in draining.done),
        overlapped=max(0.0, 1 - exposed / under_way) if under_way else None,
    )


def last_reductions(trace: Sequence[TraceEvent]) -> set[int]:
    """Return the indices of the ``"reduced"`` that end a group's reduction: a group may have one for each bucket."""
    indices: set[int] = set()
    seen: set[str | None] = set()
    for index in reversed(range(len(trace))):
        kind, group, _ = trace[index]
        if kind == "reduce":
            seen.discard(group)
        elif kind == "reduced" and group not in seen:
            seen.add(group)
            indices.add(index)
    return indices


def duration(seconds: float) -> str:
    """Format seconds for people: ``duration(0.0123)`` is ``'12.3 ms'``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


class _Spans:
    """Spans of one kind, running and done; those of one group may nest."""

    def __init__(self, kind: str, began: int) -> None:
        self.kind = kind
        self.began = began
        self.running: dict[str, list[tuple[str, int]]] = {}
        self.done: list[Span] = []

    def open(self, phase: str, group: str, now: int) -> None:
        self.running.setdefault(group, []).append((phase, now))

    def close(self, group: str, now: int) -> bool:
        """End the group's last span; return False if there is none."""
        if not self.running.get(group):
            return False
        phase, start = self.running[group].pop()
        self.done.append(Span(phase, self.kind, group, (start - self.began) * 1e-9, (now - start) * 1e-9))
        return True

    def close_all(self, now: int) -> None:
        for group in self.running:
            while self.close(group, now):
                pass


def _covered(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(reached, span.start))
        reached = max(reached, span.stop)
    return total


# ---- the chart ----
def _chart(timeline: Timeline) -> list[str]:
    """Return one row for each group, with a letter for its activity in the middle of each column's time."""
    rows: dict[str, list[Span]] = {}
    for span in timeline.spans:
        rows.setdefault(span.group, []).append(span)
    names = {group: group if len(group) <= _NAME else "..." + group[3 - _NAME :] for group in rows}
    label = max(map(len, names.values()), default=0)
    columns = _WIDTH - label - 3
    step = timeline.seconds / columns or 1.0
    innermost = [_innermost(timeline.spans, step * (column + 0.5)) for column in range(columns)]
    ruler = list("forward".ljust(columns))
    if timeline.backward is not None:
        at = max(len("forward") + 1, min(columns - len("backward"), int(timeline.backward / step)))
        ruler[at : at + len("backward")] = "backward"
    lines = [f"{' ' * label} |{''.join(ruler)}|"]
    for group, spans in rows.items():
        cells = [_letter(spans, step * (column + 0.5), innermost[column]) for column in range(columns)]
        for span in spans:  # show spans that end before a column's middle, too
            first, last = int(span.start / step), int(span.stop / step)
            if span.kind == "compute" and not {"#", "-"} & set(cells[first : last + 1]):
                cells[min(first, columns - 1)] = "#"
        lines.append(f"{names[group].ljust(label)} |{''.join(cells)}|")
    return lines


def _innermost(spans: Iterable[Span], at: float) -> Span | None:
    """Return the span that computes or waits at a time: of nested modules, the one whose pass began last."""
    now = [span for span in spans if span.kind in ("compute", "wait") and span.start <= at < span.stop]
    return max(now, key=lambda span: span.start, default=None)


def _letter(spans: Iterable[Span], at: float, innermost: Span | None) -> str:
    now = {span.kind: span for span in spans if span.start <= at < span.stop}
    if "wait" in now:
        return "w"
    if "compute" in now:
        return "#" if now["compute"] is innermost else "-"
    return "g" if "gather" in now else "r" if "reduce" in now else " "
