"""Starting ranks: their job, their place among the ranks, and how they end."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hp_plan import ParallelPlan

Resume = Literal["no", "auto", "new-data"]

# Errors of ranks that tell their user what to do. Any other is shown with its traceback.
EXPLAINED = (
    *(
        "CheckpointError",
        "CorruptionError",
        "DataError",
        "DivergedError",
        "InvalidCheckpointError",
        "MemoryShortage",
        "OutputError",
    ),
    *("PlanError", "SettingError"),
)
_AGREED = re.compile(r"failed on \d+ of \d+ ranks: ")  # of a CheckpointError


@dataclass(frozen=True)
class Job:
    """The job of every rank.

    Attributes:
        plan: the plan to run.
        folder: where a training run writes.
        json_lines: show JSON in place of a display.
        resume: "auto" goes on from the folder's newest checkpoint.
        until: stop after this step, or batch; None goes on to the last.
        events: where rank 0 writes what happens, for the launcher to show; None: rank 0 shows it itself.
        flights: where ranks note their collectives for the launcher's watch (`hanging`); None: they don't.
        checkpoint: whose weights are evaluated; None takes the plan's.
        debug_rank: the rank that a person debugs in the terminal; no time limit ends the others meanwhile.
        spares: processes that wait to take the place of one that is lost; 0: a rank that ends ends the run.
    """

    plan: ParallelPlan
    folder: Path | None = None
    json_lines: bool = False
    resume: Resume = "no"
    until: int | None = None
    events: Path | None = None
    flights: Path | None = None
    checkpoint: Path | None = None
    debug_rank: int | None = None
    spares: int = 0

    @property
    def hang_after(self) -> float:
        """Seconds after which ranks that don't go on are ended; 0: never."""
        return self.plan.run.hang_after if self.debug_rank is None else 0.0


class RankFailure(RuntimeError):
    """Failure of a rank, which ended before its work was done.

    Args:
        rank: which.
        reason: its error, or what killed it.
        alike: all ranks have raised that error. Default False.

    Attributes:
        rank: which.
        reason: its error, or what killed it.
    """

    def __init__(self, rank: int, reason: str, *, alike: bool = False) -> None:
        self.rank, self.reason = rank, reason
        if alike:
            super().__init__(reason)
            return
        # What ranks agree on they raise together, and its text names those that it is about.
        together = _AGREED.search(reason.partition("\n")[0])
        own = f"rank {rank} failed first; all ranks are ended. Its end:"
        super().__init__(f"{'all ranks have failed together. Their end:' if together else own}\n{reason}")


def explanation(kind: str, message: str, trace: str) -> str:
    """Return the text that the user of the command needs of a rank's error.

    >>> explanation("DataError", "no tokens; give files with text", "Traceback ...")
    'no tokens; give files with text'
    >>> explanation("KeyError", "'w'", "Traceback ...")
    'Traceback ...'

    Args:
        kind: the name of the error's class.
        message: the error's.
        trace: the traceback.
    """
    return message if kind in EXPLAINED else trace


class Interrupted(RuntimeError):
    """A run that a signal ended, all ranks with it.

    Args:
        number: of the signal.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name}: all ranks are ended")
