"""A picture of a rank's memory over a step, by kind."""

from __future__ import annotations

import os

from hp_plan.dry.report import KINDS, RankReport

PICTURES = (".png", ".svg", ".pdf")
_COLOURS = ("#264653", "#2a9d8f", "#8ab17d", "#8ecae6", "#e9c46a", "#e76f51")
_MIB = 2**20


def draw_memory(rank: RankReport, path: str | os.PathLike[str]) -> None:
    """Draw the bytes of each kind after each operation, with the peak and the optimizer's step marked.

    Args:
        rank: the report of a dry run with `memory=True`.
        path: the file: .png, .svg or .pdf.

    Raises:
        ValueError: another suffix, or a report without the memory over the step.
        ImportError: matplotlib isn't installed.
    """
    if os.path.splitext(path)[1] not in PICTURES:
        raise ValueError(f"draw_memory: {os.fspath(path)!r} is none of {', '.join(PICTURES)}")
    if not rank.memory:
        raise ValueError("draw_memory: the report has no memory over the step: dry_run(plan, memory=True)")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture of memory needs matplotlib: pip install 'hp-plan[plot]'") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    kinds = KINDS[:-1]  # the device's
    series = [[value / _MIB for value in rank.memory[kind]] for kind in kinds]
    operations = range(len(series[0]))
    axes.stackplot(operations, series, labels=kinds, colors=_COLOURS, step="post")
    peak, where = rank.peak, rank.peak.module or rank.peak.phase
    axes.axvline(rank.trace.optimizer_from, color="black", linewidth=0.8, linestyle="--")
    axes.annotate("optimizer", (rank.trace.optimizer_from, axes.get_ylim()[1]), fontsize=7, va="top")
    axes.plot([peak.operation], [peak.live / _MIB], "o", color="#d62828", markersize=4)
    axes.annotate(f"{peak.live / _MIB:.1f} MiB in {where}", (peak.operation, peak.live / _MIB), fontsize=7, va="bottom",
                  ha="right")  # fmt: skip
    place = ", ".join(f"{axis} {number}" for axis, number in rank.coordinates.items())
    axes.set(xlabel="operation of the step", ylabel="MiB", title=f"rank {rank.rank} ({place})", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=len(kinds), fontsize=7, frameon=False)
    figure.savefig(path)
