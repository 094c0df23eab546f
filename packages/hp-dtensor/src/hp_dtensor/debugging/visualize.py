"""Text and picture of the ranks that have each part of a tensor: `visualize_sharding`."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hp_dtensor.layout.boxes import Grid, Holders, who_holds
from hp_dtensor.layout.placements import Partial, Placement
from hp_dtensor.layout.sharding import normalize
from hp_dtensor.layout.spec import Layout, TensorSpec

_GRID_SIZE = (4.0, 3.2)  # inches
_MOST_ACROSS = 4


def visualize_sharding(
    dtensor_or_layout: Any, *, shape: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None
) -> str:
    """Show which ranks have which part of a tensor, without communication.

    Rows and columns are the boxes into which the ranks' shards divide the tensor, as ``start:stop``; a tensor of more
    dims is shown two dims at a time. Ranks in one box have the same elements; ranks in ``sum(...)`` have terms of a
    sum.

    Example:
        >>> print(visualize_sharding(Layout((2, 2), ("dp", "tp"))("dp", "tp"), shape=(5, 4)))
        shape (5, 4) on 4 ranks
        dp=2: Shard(0)
        tp=2: Shard(1)
        ┌───────────────┬─────┬─────┐
        │ dim 0 / dim 1 │ 0:2 │ 2:4 │
        ├───────────────┼─────┼─────┤
        │ 0:3           │ 0   │ 1   │
        │ 3:5           │ 2   │ 3   │
        └───────────────┴─────┴─────┘

    Args:
        dtensor_or_layout: a DTensor, or a ``Layout`` of a tensor.
        shape: the global shape, for a Layout.
        path: a file for a picture with the boxes to scale; its suffix (".svg", ".png", ".pdf") is the format.

    Returns:
        The text. The table is drawn by rich if it is installed, otherwise with ``|`` and ``-``.

    Raises:
        TypeError: neither a DTensor nor a Layout, a Layout without ``shape``, or a DTensor with ``shape``.
        ValueError: a Layout of ranks only, or placements that don't fit the shape.
        ImportError: ``path`` without matplotlib.
    """
    layout, placements, size = _described(dtensor_or_layout, shape)
    ranks = layout.rank_list
    holders = who_holds(size, placements, layout.mesh_shape)
    rank_texts = [_named(each, placements, layout.mesh_shape, ranks) for each in holders.positions]
    lines = [f"shape {size} on {len(ranks)} ranks"]
    axes = zip(layout.mesh_dim_names, layout.mesh_shape, placements, strict=True)
    lines += [f"{name}={n}: {_explained(placement)}" for name, n, placement in axes]
    if path is not None:
        _draw(holders, rank_texts, size, "\n".join(lines), path)
    for grid in holders.grids() if prod(size) else ():
        label = grid.label(size)
        lines += [label] * bool(label) + [_table(grid, rank_texts)]
    if not prod(size):
        lines.append("the tensor has no elements")
    elif holders.empty:
        lines.append(f"no elements: {_listed([ranks[index] for index in holders.empty])}")
    return "\n".join(lines)


def _described(value: Any, shape: Sequence[int] | None) -> tuple[Layout, tuple[Placement, ...], tuple[int, ...]]:
    """Return layout, placements and global shape of a DTensor or Layout."""
    spec = getattr(value, "_spec", None)
    if isinstance(spec, TensorSpec):
        if shape is not None:
            raise TypeError(f"visualize_sharding: shape={tuple(shape)} is for a Layout; the DTensor's is {spec.shape}")
        layout, shape = Layout.of(spec.mesh, spec.placements, len(spec.shape)), spec.shape
    elif not isinstance(value, Layout):
        raise TypeError(f"visualize_sharding: a DTensor or a Layout is needed, got {type(value).__name__}")
    else:
        layout = value
        if shape is None:
            raise TypeError(f"visualize_sharding: {layout!r} has no shape; pass shape=, the tensor's global shape")
    if layout.placements is None:
        raise ValueError(
            f"visualize_sharding: {layout!r} describes ranks only; call it with the axis of each tensor dim"
        )
    if layout.ndim not in (None, len(shape)):
        raise ValueError(
            f"visualize_sharding: {layout!r} has {layout.ndim} dims, but shape {tuple(shape)} has {len(shape)}"
        )
    shape = tuple(int(size) for size in shape)
    return layout, normalize(layout.placements, shape, layout.mesh_shape), shape


def _explained(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f"{placement!r}, each rank has a term of the {placement.op}"
    return f"{placement!r}, every rank has the same" if placement.is_replicate() else repr(placement)


def _named(indices: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int], ranks: Sequence[int]) -> str:
    """Return ranks as text, those that have terms of one value together in ``sum(...)``."""
    partial = [axis for axis, placement in enumerate(placements) if isinstance(placement, Partial)]
    if not partial:
        return _listed([ranks[index] for index in indices])
    together: dict[tuple[int, ...], list[int]] = {}
    for index in indices:
        at = np.unravel_index(index, mesh)
        key = tuple(int(i) for axis, i in enumerate(at) if axis not in partial)
        together.setdefault(key, []).append(ranks[index])
    op = " of ".join(dict.fromkeys(p.op for p in placements if isinstance(p, Partial)))
    return ", ".join(f"{op}({_listed(each)})" for each in together.values())


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks as text, three or more consecutive ones as ``0-3``."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    return ", ".join(f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows)


def _table(grid: Grid, rank_texts: list[str]) -> str:
    if not grid.dims:
        return text_table(["ranks"], [[rank_texts[grid.cells[0]]]])
    rows = [f"{start}:{stop}" for start, stop in grid.boxes[0]]
    if len(grid.dims) == 1:
        return text_table([f"dim {grid.dims[0]}", "ranks"], [[r, rank_texts[c]] for r, c in zip(rows, grid.cells)])
    columns = [f"{start}:{stop}" for start, stop in grid.boxes[1]]
    body = [[row, *(rank_texts[cell] for cell in line)] for row, line in zip(rows, grid.cells, strict=True)]
    return text_table([f"dim {grid.dims[0]} / dim {grid.dims[1]}", *columns], body)


# ---- the picture ----
def _draw(
    holders: Holders, rank_texts: list[str], shape: Sequence[int], title: str, path: str | os.PathLike[str]
) -> None:
    """Write a picture of a tensor's boxes, to scale, one colour for each set of ranks, by matplotlib."""
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
    kinds = {ranks: colours[i % len(colours)] for i, ranks in enumerate(dict.fromkeys(rank_texts))}
    for number, grid in enumerate(grids):
        axes = figure.add_subplot(down, across, number + 1)
        axes.set_title(grid.label(shape), fontsize=8)
        _draw_grid(axes, grid, rank_texts, kinds)
    figure.savefig(path)


def _draw_grid(axes: Any, grid: Grid, rank_texts: list[str], colours: dict[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    rows = grid.boxes[0] if grid.dims else ((0, 1),)
    columns = grid.boxes[1] if len(grid.dims) == 2 else ((0, 1),)
    cells = grid.cells.reshape(len(rows), len(columns))
    for (top, bottom), line in zip(rows, cells, strict=True):
        for (left, right), cell in zip(columns, line, strict=True):
            ranks = rank_texts[cell]
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


# ---- tables ----
_WIDE = 100_000  # so that rich neither truncates columns nor breaks lines


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, without colours: drawn by rich if it is installed, otherwise with ``|`` and ``-``.

    Args:
        header: the title of each column.
        rows: as many texts each as there are columns.

    Returns:
        Lines joined by newlines, without one at the end.
    """
    try:
        from rich.box import SQUARE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return _plain(header, rows)
    table = Table(box=SQUARE)
    for each in header:
        table.add_column(Text(each))
    for row in rows:
        table.add_row(*(Text(each) for each in row))
    file = io.StringIO()
    Console(file=file, width=_WIDE, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))


def _plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [" | ".join(each.ljust(w) for each, w in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
