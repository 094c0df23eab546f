"""A step as a picture, drawn with matplotlib, or as a chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from hp_fsdp.explanation.memory import Event, MemoryPoint
from hp_fsdp.explanation.timeline import Span, Timeline

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
