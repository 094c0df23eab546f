"""The option `--version`."""

from __future__ import annotations

from typing import Annotated

import typer

from hyper_parallel.reports.run_metadata import versions


def _print(wanted: bool) -> None:
    if wanted:
        found = versions()
        own = found.pop("hyper-parallel", "of a checkout")
        others = ", ".join(f"{name} {number}" for name, number in found.items() if not name.startswith("hp-"))
        typer.echo(f"hyper-parallel {own} ({others})")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print, is_eager=True, help="Print the versions of this and of what it runs on."
    ),
]
