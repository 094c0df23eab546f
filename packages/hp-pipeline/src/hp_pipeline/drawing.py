"""Pictures of a trace: SVG, text, and the format of chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from html import escape

from hp_pipeline.orders.pipeline import MetaStepType, compute_parts
from hp_pipeline.orders.simulation import Trace

__all__ = ["to_chrome", "to_svg", "to_text"]

_T = MetaStepType
_COLORS = {_T.FORWARD: "#9ecae1", _T.BACKWARD: "#a1d99b", _T.BACKWARD_INPUT: "#c7e9c0", _T.BACKWARD_WEIGHT: "#fdd0a2"}
_JOINT = "#bcbddc"
_ROW, _LEFT, _WIDTH = 22, 60, 1200


def to_svg(trace: Trace) -> str:
    """Draw a trace: a row a rank, a box a step with its micro-batch; borders of a rank's later stages are black.

    Args:
        trace: of ``simulate``.

    Returns:
        The SVG document, 1,260 points wide.
    """
    scale = _WIDTH / (trace.makespan or 1.0)
    height = _ROW * len(trace.spans) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="11">'
    ]
    for rank, spans in enumerate(trace.spans):
        y = rank * _ROW
        parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
        lowest = min((part.stage_index or 0 for span in spans for part in compute_parts(span.step)), default=0)
        for span in spans:
            own = compute_parts(span.step)
            color = _COLORS[own[0].step_type] if len(own) == 1 else _JOINT
            x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
            border = "#636363" if (own[0].stage_index or 0) == lowest else "#000000"
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}"'
                f' fill="{color}" stroke="{border}">'
                f"<title>{escape(str(span.step))}: {span.start:g} to {span.end:g} s</title></rect>"
            )
            if width > 9:
                text = "+".join(str(part.micro_index) for part in own)
                parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle">{text}</text>')
    share = f"{trace.makespan:g} s, bubble {trace.bubble:g} s ({trace.bubble_ratio:.1%})"
    parts.append(f'<text x="{_LEFT}" y="{height - 8}">{share}</text></svg>')
    return "\n".join(parts)


def to_text(trace: Trace, width: int = 100) -> str:
    """Draw a trace in characters: a line a rank, the step that runs at each moment by its type, ``.`` for none.

    Args:
        trace: of ``simulate``.
        width: characters of a line, at least 1.
    """
    lines = []
    for rank, spans in enumerate(trace.spans):
        row = ["."] * width
        for span in spans:
            first = round(span.start / (trace.makespan or 1.0) * width)
            last = max(first + 1, round(span.end / (trace.makespan or 1.0) * width))
            kind = span.step.step_type.value if not span.step.sub_steps else "X"
            row[first:last] = kind * (last - first)
        lines.append(f"rank {rank:3d} |{''.join(row[:width])}| {_bytes(trace.peaks[rank])}")
    times = f"bubble {_seconds(trace.bubble)} of {_seconds(trace.makespan)} ({trace.bubble_ratio:.1%})"
    return "\n".join([*lines, times])


def _bytes(count: float) -> str:
    """Format bytes for people.

    >>> _bytes(700), _bytes(1.5 * 2**20), _bytes(3 * 2**30)
    ('700 bytes', '1.5 MiB', '3.0 GiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:g} bytes"


def _seconds(time: float) -> str:
    """Format seconds for people.

    >>> _seconds(2.5), _seconds(0.00034), _seconds(0.0)
    ('2.5 s', '340 us', '0 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= scale:
            return f"{time / scale:.3g} {unit}"
    return f"{time:g} s"


def to_chrome(trace: Trace) -> str:
    """Write a trace as JSON that chrome://tracing and Perfetto read; a second of the trace is a second there.

    Args:
        trace: of ``simulate``.
    """
    events = [
        {
            "name": str(span.step),
            "cat": span.step.step_type.name,
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "pid": 0,
            "tid": rank,
        }
        for rank, spans in enumerate(trace.spans)
        for span in spans
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(trace.spans))
    ]
    return json.dumps({"traceEvents": names + events})
