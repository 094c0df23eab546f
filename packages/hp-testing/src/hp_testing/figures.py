"""Figures of benchmarks, for the summary that sets them beside their bars."""

from __future__ import annotations

import json
import os
from pathlib import Path

FIGURES = "HYPER_PARALLEL_FIGURES"
"""The environment's variable that names the file to which figures are added, a line of JSON each."""


def note_figure(table: str, name: str, value: float) -> None:
    """Add a figure to the file that ``$HYPER_PARALLEL_FIGURES`` names; without one, do nothing.

    Args:
        table: title of the table that it stands in.
        name: of its row.
        value: usually ours over the peer's, measured in turns.
    """
    path = os.environ.get(FIGURES)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            print(json.dumps([table, name, value]), file=file)


def read_figures(path: Path) -> dict[tuple[str, str], float]:
    """Read the figures of a file: (table, name) -> value."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(table, name): value for table, name, value in map(json.loads, lines)}
