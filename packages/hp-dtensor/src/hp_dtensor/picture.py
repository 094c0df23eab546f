"""A picture of who holds what of a tensor, drawn with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

from hp_dtensor.holders import Grid, Holders

__all__ = ["draw"]

_GRID_SIZE = (4.0, 3.2)  # inches
_MOST_ACROSS = 4


def draw(holders: Holders, held: list[str], shape: Sequence[int], title: str, path: str | os.PathLike[str]) -> None:
    """Writes a picture of a tensor's boxes, to scale, one colour for each set of ranks.

    Args:
        holders: who holds what.
        held: for each of ``holders.held`` the ranks as text.
        shape: the global shape.
        title: what stands above.
        path: the file; its suffix says the format.

    Raises:
        ImportError: matplotlib isn't installed.
        ValueError: matplotlib doesn't write that format.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture of a sharding needs matplotlib: pip install 'hp-dtensor[plot]'") from error
    grids = list(holders.grids()) if prod(shape) else []
    across = min(_MOST_ACROSS, max(1, len(grids)))
    down = max(1, -(-len(grids) // across))
    figure = Figure(figsize=(_GRID_SIZE[0] * across, _GRID_SIZE[1] * down + 0.8), layout="constrained")
    figure.suptitle(title, fontsize=9)
    colours = colormaps["Set3"].colors  # type: ignore[attr-defined]
    kinds = {ranks: colours[i % len(colours)] for i, ranks in enumerate(dict.fromkeys(held))}
    for number, grid in enumerate(grids):
        axes = figure.add_subplot(down, across, number + 1)
        axes.set_title(grid.label(shape), fontsize=8)
        _draw_grid(axes, grid, held, kinds)
    figure.savefig(path)


def _draw_grid(axes: Any, grid: Grid, held: list[str], colours: dict[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    rows = grid.boxes[0] if grid.dims else ((0, 1),)
    columns = grid.boxes[1] if len(grid.dims) == 2 else ((0, 1),)
    cells = grid.cells.reshape(len(rows), len(columns))
    for (top, bottom), line in zip(rows, cells, strict=True):
        for (left, right), cell in zip(columns, line, strict=True):
            ranks = held[cell]
            box = Rectangle((left, top), right - left, bottom - top, facecolor=colours[ranks], edgecolor="black")
            axes.add_patch(box)
            axes.text((left + right) / 2, (top + bottom) / 2, ranks, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, columns[-1][1]), ylim=(rows[-1][1], 0))
    for which, boxes, position in ((axes.yaxis, rows, 0), (axes.xaxis, columns, 1)):
        if position < len(grid.dims):
            which.set_ticks([boxes[0][0], *(stop for _, stop in boxes)])
            which.set_label_text(f"dim {grid.dims[position]}", fontsize=8)
        else:
            which.set_ticks([])
    axes.tick_params(labelsize=7)
