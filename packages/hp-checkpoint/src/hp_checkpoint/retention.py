"""Retention: the steps of a run that have a checkpoint, and those that stay."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hp_checkpoint.manifest import MANIFEST
from hp_checkpoint.storage import new_nonce, part_folder

__all__ = ["Keep", "prune", "remove", "step_folder", "steps_in"]

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The checkpoints that stay when a new one is complete; later steps than its own are left alone.

    Those are of a training that went on from an older checkpoint: because they can't be read, or to try something else.

    Attributes:
        last: so many of the newest up to the new one. Default 2.
        every: those whose step is a multiple of it as well. Default None: no others.

    Raises:
        ValueError: a number below 1.
    """

    last: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            raise ValueError(f"{self}: last and every must be at least 1")

    def removed(self, steps: Iterable[int], saved: int | None = None) -> list[int]:
        """Return the steps that don't stay.

        >>> Keep(last=1, every=100).removed([100, 150, 200, 250])
        [150]
        >>> Keep(last=1).removed([100, 150, 200, 250], saved=150)
        [100]

        Args:
            steps: that have a checkpoint.
            saved: the step that was saved just now. Default None: the newest.
        """
        ordered = sorted(step for step in steps if saved is None or step <= saved)
        return [step for step in ordered[: -self.last] if self.every is None or step % self.every]


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in that of a run."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """List the steps that have a checkpoint in a run's folder, ascending."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step-*") if (path / MANIFEST).exists())
    return sorted(int(match[1]) for match in matches if match)


def prune(folder: Path, keep: Keep, saved: int | None = None) -> list[int]:
    """Remove the checkpoints of a run that don't stay, and return their steps.

    Args:
        folder: of the run.
        keep: what stays.
        saved: the step that was saved just now. Default None: the newest.
    """
    removed = keep.removed(steps_in(folder), saved)
    for step in removed:
        remove(step_folder(folder, step))
    return removed


def remove(folder: Path) -> None:
    """Remove a checkpoint; what an interruption leaves is none, and the next save removes it.

    Another process may have removed it just before: the command ``prune`` beside a training.
    """
    rest = part_folder(folder, new_nonce())
    with suppress(FileNotFoundError):
        os.rename(folder, rest)
    shutil.rmtree(rest, ignore_errors=True)
