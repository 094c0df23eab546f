"""Timeline: what the groups of a model did in a step, and when; made of the moments that a step left behind.

Note [Whose clock]
    Moments are of the host's clock. On CPU, with gloo, they tell when things happened. On devices they tell when the
    host issued work, and how long it stood still itself: kernels and collectives run later, and a wait makes the
    device's stream wait, not the host. For the device's own clock take torch.profiler, where the ranges are called
    ``hp.fsdp.all_gather(<group>)``, ``hp.fsdp.wait_all_gather(<group>)`` and ``hp.fsdp.reduce_scatter(<group>)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["KINDS", "Moment", "Span", "Timeline", "timeline_of"]

Moment = tuple[str, str | None, int]
"""What happened, the name of the group, if it was one's, and when in nanoseconds."""

KINDS = ("gather", "wait", "run", "left", "free", "reduce", "reduced", "backward", "end")
"""The kinds of moments: a group's gather was issued, it is waited for, the module computes, its forward or backward is
over, its gathered parameters are freed, its reduction was issued, its sharded gradients are there; the backward pass
begins, it ends."""

_NAME = 28
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasts.

    Attributes:
        phase: ``"forward"`` or ``"backward"``: where it began.
        kind: ``"compute"`` (the group's module; what is inside it computes in the meantime, too), ``"gather"`` and
            ``"reduce"`` (under way, from where it was issued to where it was found done, waits included) or ``"wait"``.
        group: the group's name.
        start: seconds from the beginning of the step.
        seconds: how long.
    """

    phase: str
    kind: str
    group: str
    start: float
    seconds: float

    @property
    def stop(self) -> float:
        """Where it ends, in seconds from the beginning of the step."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """One forward and backward pass by the host's clock, see Note [Whose clock]; ``print`` it for a chart.

    Attributes:
        spans: in the order in which they began.
        seconds: from the first moment to the last; the optimizer's step is not in it.
        backward: where the backward pass began, in seconds; None where there was none.
        computing: seconds in which a module computed and nothing was waited for. What runs between modules, such as
            the loss, is in neither.
        waiting_for_gathers: seconds of waits for parameters: communication that nothing hid.
        waiting_for_reductions: the same for gradients.
        overlapped: share, 0 to 1, of the time that gathers and reductions were under way in which nobody waited for
            them. One that was done before somebody asked counts to where that was, so it is a bound from above. None
            where none took any time.
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
        legend = "# computes   - what is inside it does   w waits   g gather under way   r reduction under way"
        return "\n".join([*_chart(self), legend, self.summary])


def timeline_of(moments: Sequence[Moment]) -> Timeline:
    """Puts moments together to spans, and sums them up.

    Example:
        >>> ms = 1_000_000
        >>> told = timeline_of(
        ...     [("gather", "a", 0), ("wait", "a", 1 * ms), ("run", "a", 3 * ms), ("left", "a", 9 * ms)]
        ... )
        >>> [(span.kind, round(span.start, 6), round(span.seconds, 6)) for span in told.spans]
        [('gather', 0.0, 0.003), ('wait', 0.001, 0.002), ('compute', 0.003, 0.006)]

    Args:
        moments: of one pass, in their order. A wait for a reduction begins with the moment before its ``"reduced"``.

    Raises:
        ValueError: there are none, or one is of no known kind.
    """
    if not moments:
        raise ValueError("timeline_of: expected the moments of a step, got none")
    began, ended = moments[0][2], moments[-1][2]
    gathering, reducing = _Spans("gather", began), _Spans("reduce", began)
    computing, waiting, draining = _Spans("compute", began), _Spans("wait", began), _Spans("wait", began)
    phase, backward, before = "forward", None, began
    complete = last_reductions(moments)
    for index, (kind, group, now) in enumerate(moments):
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
        elif kind == "free":  # nobody used what was gathered ahead of time
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


def last_reductions(moments: Sequence[Moment]) -> set[int]:
    """Which ``"reduced"`` end a group's reduction, by their place in ``moments``: a group may have one a bucket."""
    found: set[int] = set()
    seen: set[str | None] = set()
    for index in reversed(range(len(moments))):
        kind, group, _ = moments[index]
        if kind == "reduce":
            seen.discard(group)
        elif kind == "reduced" and group not in seen:
            seen.add(group)
            found.add(index)
    return found


def duration(seconds: float) -> str:
    """Seconds as a person reads them: ``duration(0.0123)`` is ``'12.3 ms'``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


class _Spans:
    """Spans of one kind: those that began and those that are over; a group's may lie in one another."""

    def __init__(self, kind: str, began: int) -> None:
        self.kind = kind
        self.began = began
        self.running: dict[str, list[tuple[str, int]]] = {}
        self.done: list[Span] = []

    def open(self, phase: str, group: str, now: int) -> None:
        self.running.setdefault(group, []).append((phase, now))

    def close(self, group: str, now: int) -> bool:
        """Ends the group's last one; False where there is none."""
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
    """Seconds in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(reached, span.start))
        reached = max(reached, span.stop)
    return total


# ---- the chart ----
def _chart(timeline: Timeline) -> list[str]:
    """A row a group, a letter for what it does in the middle of each column's time."""
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
        for span in spans:  # one that is over before a column's middle is shown, too
            first, last = int(span.start / step), int(span.stop / step)
            if span.kind == "compute" and not {"#", "-"} & set(cells[first : last + 1]):
                cells[min(first, columns - 1)] = "#"
        lines.append(f"{names[group].ljust(label)} |{''.join(cells)}|")
    return lines


def _innermost(spans: Iterable[Span], at: float) -> Span | None:
    """What computes or waits at a time: of modules in one another, the one whose pass began last."""
    now = [span for span in spans if span.kind in ("compute", "wait") and span.start <= at < span.stop]
    return max(now, key=lambda span: span.start, default=None)


def _letter(spans: Iterable[Span], at: float, innermost: Span | None) -> str:
    now = {span.kind: span for span in spans if span.start <= at < span.stop}
    if "wait" in now:
        return "w"
    if "compute" in now:
        return "#" if now["compute"] is innermost else "-"
    return "g" if "gather" in now else "r" if "reduce" in now else " "
