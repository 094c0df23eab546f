"""What the ranks of a run that failed say of what is saved; whoever started them shows it."""

from __future__ import annotations

import sys

from hp_checkpoint.extend import steps_in
from hp_platform.extend import read_flight
from hyper_parallel.launch import Job
from hyper_parallel.output import CHECKPOINTS

__all__ = ["note", "show_notes"]

_NOTES = "notes"


def note(job: Job, text: str) -> None:
    """Say something on a rank: to its launcher, which has the terminal, or where there is none to stderr.

    Args:
        job: of the rank.
        text: what.
    """
    if job.flights is None:
        _write(text)
        return
    with open(job.flights / _NOTES, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def show_notes(job: Job, ranks: int) -> None:
    """Show what the ranks of a run that failed have said; where they said nothing, what is lost, and why.

    Args:
        job: of the ranks.
        ranks: their number.
    """
    assert job.flights is not None
    notes = job.flights / _NOTES
    if notes.exists():
        for text in notes.read_text(encoding="utf-8").splitlines():
            _write(text)
        return
    if job.folder is None:
        return
    flights = [read_flight(job.flights, rank) for rank in range(ranks)]
    done = max((flight.step for flight in flights if flight is not None), default=0)
    newest = max(steps_in(job.folder / CHECKPOINTS), default=0)
    if done > newest:
        what = f"the newest checkpoint is step {newest}" if newest else "there is no checkpoint"
        why = "no rank was left that could: of ranks that wait in a collective only those of gloo hear of a lost one"
        _write(f"step {done} was finished and not saved; {what}; {why}")


def _write(text: str) -> None:
    sys.stderr.write(f"note: {text}\n")
    sys.stderr.flush()
