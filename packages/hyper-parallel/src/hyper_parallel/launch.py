"""Starting ranks: what the command line hands to them, and what it hears of their end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hp_plan import ParallelPlan


@dataclass(frozen=True)
class Job:
    """What every rank is given.

    Attributes:
        plan: what to run.
        folder: where a training run writes.
        json_lines: show JSON in place of a display.
    """

    plan: ParallelPlan
    folder: Path | None = None
    json_lines: bool = False


class RankFailure(RuntimeError):
    """A rank that ended before its work was done.

    Attributes:
        rank: which.
        reason: its traceback, or what killed it.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(f"rank {rank} failed first; all ranks are ended. Its end:\n{reason}")


class Interrupted(RuntimeError):
    """A run that a signal ended, all ranks with it."""


def inside_launcher() -> bool:
    """Whether this process is a rank already: torchrun has set its place in the world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def divide_threads(ranks: int) -> int:
    """How many threads each of the ranks on this machine should use: together no more than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
