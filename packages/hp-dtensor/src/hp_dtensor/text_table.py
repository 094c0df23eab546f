"""Tables as text."""

from __future__ import annotations

import io
from collections.abc import Sequence

__all__ = ["text_table"]

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
