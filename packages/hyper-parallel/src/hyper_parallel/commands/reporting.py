"""Answers of commands to their user: errors, in place of tracebacks, and versions."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hp_checkpoint import CheckpointError
from hp_checkpoint.extend import steps_in
from hp_plan import CorruptionError, Diagnostic, PlanError
from hp_platform.extend import SettingError, inside_launcher, launcher_place, leave_to_speaker, tell_torchrun
from hyper_parallel.data import DataError
from hyper_parallel.launching.launch import Interrupted, RankFailure
from hyper_parallel.reports.display import diagnostics_table, make_console
from hyper_parallel.reports.output import CHECKPOINTS, METRICS, OutputError, newest_checkpoint
from hyper_parallel.reports.run_metadata import versions
from hyper_parallel.supervision.run_end import DivergedError, MemoryShortage

_ADVISED = (CheckpointError, CorruptionError, DataError, DivergedError, MemoryShortage, OutputError)


@contextmanager
def user_errors() -> Iterator[None]:
    """Report errors that a user can mend and exit with 1; any other error is a bug and propagates."""
    try:
        yield
    except (PlanError, SettingError) as error:  # all ranks have it
        leave_to_speaker()
        if isinstance(error, PlanError):
            show_diagnostics(error.diagnostics)
            tell_torchrun(
                f"the plan has errors, in the table above: {', '.join(each.key for each in error.diagnostics)}"
            )
        else:
            say(str(error))
            tell_torchrun(str(error))
    except Interrupted as error:
        say(f"interrupted by {error}")
        raise typer.Exit(128 + error.number) from None
    except (*_ADVISED, RankFailure, ImportError, OSError) as error:
        if inside_launcher() and not isinstance(error, _ADVISED):
            raise
        say(str(error))
    else:
        return
    raise typer.Exit(1)


@contextmanager
def saying_what_is_saved(folder: Path) -> Iterator[None]:
    """Say, where a run ends before its time, from what it can go on.

    Args:
        folder: of the run.

    Raises:
        typer.Exit: a signal has stopped the run, and all of its steps are saved: that is no error.
    """
    before = max(steps_in(folder / CHECKPOINTS), default=0)
    try:
        yield
    except (Interrupted, RankFailure) as error:
        steps = steps_in(folder / CHECKPOINTS)
        if isinstance(error, Interrupted) and steps and steps[-1] == _last_step(folder):
            name = f"{signal.Signals(error.number).name}: step {steps[-1]} is saved in {newest_checkpoint(folder)}"
            typer.echo(f"stopped by {name}; go on by --resume auto --out {folder}", err=True)
            raise typer.Exit(128 + error.number) from None
        # A failure may be that of an older checkpoint, which can't be read or doesn't fit.
        if steps and (isinstance(error, Interrupted) or steps[-1] > before):
            typer.echo(f"note: go on from step {steps[-1]} by --resume auto --out {folder}", err=True)
        elif isinstance(error, Interrupted) and (folder / METRICS).exists():
            fix = "it was not left run.stop_within seconds to save one; run.checkpoint_every = N saves every N steps"
            typer.echo(f"note: the run has no checkpoint: {fix}", err=True)
        raise


def _last_step(folder: Path) -> int | None:
    """Return the last step that the metrics of a run have."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        return json.loads(lines[-1])["step"]
    except (IndexError, ValueError, KeyError):  # none, or half a line
        return None


def say(text: str) -> None:
    """Write an error to stderr."""
    # An interrupted live display leaves the cursor hidden.
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
    typer.secho(f"error: {text}", err=True, fg=typer.colors.RED)


def leads() -> bool:
    """Return True if this process is rank 0, or not a rank."""
    place = launcher_place()
    return place is None or place.rank == 0


def show_diagnostics(diagnostics: Sequence[Diagnostic], *, source: str = "the plan") -> None:
    """Write a plan's errors to stderr."""
    try:
        console = make_console(stderr=True)
    except ImportError:
        say(str(PlanError(diagnostics, source=source)))
        return
    console.print(f"[red]error:[/red] {source} has {len(diagnostics)} error{'s' if len(diagnostics) != 1 else ''}")
    console.print(diagnostics_table((each.key, each.message, each.fix) for each in diagnostics))


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
