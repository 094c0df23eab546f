"""An explanation as a chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hp_fsdp.timeline import Span, Timeline

if TYPE_CHECKING:
    from hp_fsdp.explaining import Explanation

__all__ = ["write_trace"]

Entry = dict[str, object]


def write_trace(explanation: Explanation, path: str | os.PathLike[str]) -> None:
    """Writes the times of the last step, or the order of a step where there were none.

    Args:
        explanation: what to write.
        path: the file, JSON.
    """
    if explanation.timeline is None:
        made = _order(explanation)
    else:
        made = [*_times(explanation.timeline), *(_held(h.at, h.parameters, h.gradients) for h in explanation.held)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": made, "displayTimeUnit": "ms"}, file)


def _order(explanation: Explanation) -> list[Entry]:
    rows = {kind: number for number, kind in enumerate(("run", "gather", "reduce", "free"))}
    made = [_row(kind, number) for kind, number in rows.items()]
    for at, event in enumerate(explanation.events):
        told = {"name": event.group, "cat": event.phase, "pid": 0, "tid": rows[event.kind], "ts": at}
        made.append({**told, "ph": "X", "dur": 1, "args": asdict(event)})
        made.append(_held(at * 1e-6, event.unsharded, event.gradients))
    return made


def _times(timeline: Timeline) -> Iterable[Entry]:
    """Spans by kind; what overlaps without lying in one another, as gathers do, goes to a row of its own."""
    rows = 0
    for kind in ("compute", "wait", "gather", "reduce"):
        for lane in _lanes([span for span in timeline.spans if span.kind == kind]):
            yield _row(kind, rows)
            for span in lane:
                told = {"name": span.group, "cat": span.phase, "pid": 0, "tid": rows, "ph": "X"}
                yield {**told, "ts": span.start * 1e6, "dur": span.seconds * 1e6, "args": {"kind": kind}}
            rows += 1


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans on as few rows as it takes, in each of which one is over, or contains the next, where that begins."""
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


def _held(at: float, parameters: int, gradients: int) -> Entry:
    held = {"parameters": parameters, "gradients": gradients}
    return {"name": "unsharded bytes", "ph": "C", "pid": 0, "ts": at * 1e6, "args": held}
