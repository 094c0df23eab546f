"""A picture of a step: what each group does, and unsharded bytes, over time; drawn with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hp_fsdp.held import Held
from hp_fsdp.timeline import Timeline

__all__ = ["draw"]

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


def draw(timeline: Timeline, held: Sequence[Held], path: str | os.PathLike[str]) -> None:
    """Writes a picture: a row a group, the bytes of gathered parameters and unsharded gradients under it.

    Args:
        timeline: the times.
        held: the bytes.
        path: the file; its suffix says the format.

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
    _draw_held(below, timeline, held)
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


def _draw_held(axes: Any, timeline: Timeline, held: Sequence[Held]) -> None:
    times = [0.0, *(each.at * 1e3 for each in held), timeline.seconds * 1e3]
    for values, label in (
        ([each.parameters for each in held], "unsharded parameters"),
        ([each.gradients for each in held], "unsharded gradients"),
    ):
        sizes = [value / 2**20 for value in (0, *values)]
        axes.step(times, [*sizes, sizes[-1]], where="post", label=label, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
