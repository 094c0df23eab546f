"""Readings of monitored runs: `hyper-parallel monitor show` and `monitor compare`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hp_plan import compare_readings, read_readings
from hyper_parallel.commands.plans import Json
from hyper_parallel.commands.reporting import user_errors
from hyper_parallel.reports.display import make_console, readings_table
from hyper_parallel.reports.output import OutputError
from hyper_parallel.reports.readings import draw_readings, series

app = typer.Typer(no_args_is_help=True, help="Show and compare the readings of monitored runs.")
Phase = Literal["loss", "forward", "backward", "gradient", "moment", "weight"]
FULL: dict[str, Any] = {
    "every": 1,
    "phases": ["loss", "forward", "backward", "gradient", "moment", "weight"],
    "names": [],
    "numbers": ["norm", "range", "zeros", "bits"],
}
"""What `train --monitor full` reads."""


@app.callback()
def _monitor() -> None:
    """Show and compare the readings of monitored runs."""


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.", show_default=False)],
    name: Annotated[
        str, typer.Option(metavar="PATTERN", help="Of modules or parameters; * stands for dots, too.")
    ] = "*",
    phase: Annotated[
        Phase | None, typer.Option(help="By default gradient, or the first that was read.", show_default=False)
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a heat map and curves of all of them.", show_default=False)
    ] = None,
    json_lines: Json = False,
) -> None:
    """Show the norm of each tensor over the steps, and its smallest and largest element."""
    with user_errors():
        shown = series(read_readings(run), phase, name)
        if png is not None:
            draw_readings(shown, png, title=f"{shown.phase} of {run}")
        if not json_lines:
            make_console().print(readings_table(shown))
        for each, norms in shown.norms.items() if json_lines else ():
            values = {"norms": norms, "low": shown.lows[each], "high": shown.highs[each]}
            lists = {key: [_strict(number) for number in numbers.tolist()] for key, numbers in values.items()}
            typer.echo(json.dumps({"name": each, "phase": shown.phase, "steps": list(shown.steps), **lists}))
        if png is not None:
            typer.echo(str(png))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run's folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another's.", show_default=False)],
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of norms, relative; by default bits, or the dtype's.", show_default=False),
    ] = None,
    json_lines: Json = False,
) -> None:
    """Name the first step, phase, module and rank in which two runs differ; exit 1 where they do."""
    with user_errors():
        try:
            result = compare_readings(first, second, tolerance=tolerance)
        except ValueError as error:
            raise OutputError(str(error)) from error
        if json_lines:
            values = dataclasses.asdict(result)
            typer.echo(json.dumps(_strict(values)))
        else:
            by = "bits" if result.by == "bits" else f"norms within {result.tolerance:g}"
            typer.echo(f"{result.readings:,} readings of {result.steps:,} steps, by {by}")
            typer.echo("equal" if result.first is None else f"first: {result.first}")
            for number, each in enumerate(result.largest, 1):
                typer.echo(f"largest {number}: {each}")
        if result.first is not None:
            raise typer.Exit(1)


def _strict(value: Any) -> Any:
    """Return a value as JSON can hold it: null where a number is none or infinite."""
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
