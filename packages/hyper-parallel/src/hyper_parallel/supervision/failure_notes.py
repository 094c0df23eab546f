"""What the ranks of a run say besides numbers: warnings, and of a run that failed what is saved."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_checkpoint.extend import steps_in
from hp_platform.extend import read_flight
from hyper_parallel.launching.launch import Job
from hyper_parallel.reports.output import CHECKPOINTS, WARNINGS

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


class KeptWarnings:
    """The warnings of a rank, which stay in the run's folder as lines of JSON.

    Args:
        rank: which.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._path, self._early = rank, None, list[str]()

    def add(self, text: str) -> None:
        """Keep a warning; one that comes before the folder is known waits for it."""
        self._early.append(text)
        if self._path is not None:
            self.write_to(self._path.parent)

    def write_to(self, folder: Path) -> None:
        """Write to the folder of the run what there is, and what comes."""
        self._path = folder / WARNINGS
        lines = [json.dumps({"rank": self._rank, "text": text}) + "\n" for text in self._early]
        self._early.clear()
        if lines:
            with contextlib.suppress(OSError), open(self._path, "a", encoding="utf-8") as file:  # shown all the same
                file.write("".join(lines))


@contextlib.contextmanager
def keeping_warnings(rank: int) -> Iterator[KeptWarnings]:
    """Keep the warnings of Python code inside, which are shown as they were.

    Args:
        rank: this one.
    """
    kept, shown = KeptWarnings(rank), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        kept.add(f"{category.__name__}: {message}")
        shown(message, category, filename, lineno, *more)

    warnings.showwarning = show
    try:
        yield kept
    finally:
        warnings.showwarning = shown
