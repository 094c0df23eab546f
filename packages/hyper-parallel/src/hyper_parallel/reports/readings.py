"""Readings of a monitored run as numbers of whole tensors, as lines of a terminal, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_plan import RankReadings
from hp_plan.extend import ALONE, COUNTED, PHASES
from hyper_parallel.reports.output import OutputError, make_figure

_BARS = "▁▂▃▄▅▆▇█"
_BROKEN = "!"  # a step with a number that isn't finite


@dataclass(frozen=True)
class Series:
    """Readings of one phase over the steps.

    Attributes:
        phase: as of `hp_plan.Reading`.
        steps: their numbers.
        norms: of each name, of the whole tensor; over micro-batches together.
        lows: the smallest element of each.
        highs: the largest.
    """

    phase: str
    steps: Sequence[int]
    norms: Mapping[str, NDArray[np.float64]]
    lows: Mapping[str, NDArray[np.float64]]
    highs: Mapping[str, NDArray[np.float64]]


def series(run: Mapping[int, RankReadings], phase: str | None, pattern: str) -> Series:
    """Put the readings of ranks and micro-batches together.

    Args:
        run: as `read_readings` returns it.
        phase: which; None takes gradients, or the first that the run has.
        pattern: of names; `*` stands for dots, too.

    Raises:
        OutputError: the run has no such phase, or no such name in it.
    """
    if phase != "loss" and any("norm" not in own.layout["numbers"] for own in run.values()):
        raise OutputError("the run has no norms to show: numbers = ['norm', 'range'] in [monitor] reads them")
    numbers = {int(each) for own in run.values() for each in np.unique(own.records["phase"])}
    present = [each for number, each in enumerate(PHASES) if number in numbers]
    if phase is None:
        phase = "gradient" if "gradient" in present or not present else present[0]
    if phase not in present:
        raise OutputError(f"the run has no readings of phase {phase!r}; it has {', '.join(present) or 'none'}")
    steps = sorted({int(each) for own in run.values() for each in np.unique(own.records["step"])})
    squares, lows, highs = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    names = list[str]()
    for own in run.values():
        records = own.records[own.records["phase"] == PHASES.index(phase)]
        at = np.searchsorted(steps, records["step"])
        for number in dict.fromkeys(records["name"].tolist()):
            name = own.names[int(number)]
            names.append(name)
            if not fnmatchcase(name, pattern):
                continue
            mine = records["name"] == number
            kept = mine & ((records["flags"] & (COUNTED | ALONE)) != 0)
            for values, start in ((squares, 0.0), (lows, math.inf), (highs, -math.inf)):
                values.setdefault(name, np.full(len(steps), start))
            np.add.at(squares[name], at[kept], np.square(records["norm"][kept]))
            np.minimum.at(lows[name], at[mine], records["low"][mine])
            np.maximum.at(highs[name], at[mine], records["high"][mine])
    if not squares:
        known = ", ".join(dict.fromkeys(names[:3]))
        raise OutputError(f"no name of phase {phase!r} matches {pattern!r}; the run has {known} and others")
    missing = {name: np.isinf(low) & (low > 0) & np.isinf(highs[name]) for name, low in lows.items()}  # or empty
    norms = {name: np.where(missing[name], np.nan, np.sqrt(each)) for name, each in squares.items()}
    return Series(phase, steps, norms, lows, highs)


def sparkline(values: NDArray[np.float64], width: int = 40) -> str:
    """Draw numbers as one line of bars, the largest of a few steps each.

    >>> sparkline(np.array([0.0, 1.0, 2.0, np.nan]))
    '▁▅█!'
    """
    parts = np.array_split(values, min(width, len(values)))
    tops = np.array([np.nan if np.isnan(part).any() else part.max() for part in parts])
    finite = tops[np.isfinite(tops)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    scaled = (tops - low) / ((high - low) or 1.0)
    return "".join(
        _BARS[min(len(_BARS) - 1, round(float(each) * (len(_BARS) - 1) + 1e-9))] if np.isfinite(each) else _BROKEN
        for each in scaled
    )


def draw_readings(shown: Series, path: Path, *, title: str) -> None:
    """Draw a heat map of norms, names by steps, and the norms over the steps, as a PNG.

    Raises:
        ImportError: matplotlib isn't installed.
    """
    names = list(shown.norms)
    figure = make_figure(11, min(40.0, 4.5 + 0.16 * len(names)))
    upper, lower = figure.subplots(2, 1, height_ratios=(max(1.0, 0.16 * len(names)), 3.0))
    grid = np.array([shown.norms[name] for name in names])
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log10(np.where(grid > 0, grid, np.nan))
    edges = np.arange(len(shown.steps) + 1) - 0.5
    image = upper.pcolormesh(edges, np.arange(len(names) + 1) - 0.5, logarithms, cmap="viridis")
    figure.colorbar(image, ax=upper, label="log10 of the norm (white: zero or not finite)")
    places = np.unique(np.linspace(0, len(shown.steps) - 1, min(8, len(shown.steps))).astype(int))
    upper.set_xticks(places, [shown.steps[place] for place in places])
    some = np.unique(np.linspace(0, len(names) - 1, min(60, len(names))).astype(int))
    upper.set_yticks(some, [names[place] or "loss" for place in some], fontsize=6)
    upper.invert_yaxis()
    upper.set(xlabel="step", title=title)
    for name, norms in list(shown.norms.items())[:200]:
        lower.plot(shown.steps, norms, linewidth=0.8, label=name)
    if len(names) <= 8:
        lower.legend(fontsize=7)
    lower.xaxis.get_major_locator().set_params(integer=True)
    if (grid[np.isfinite(grid)] > 0).any():
        lower.set_yscale("log")
    lower.set(xlabel="step", ylabel=f"norm of each {shown.phase}")
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
