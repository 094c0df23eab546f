"""Retention: the steps of a run that have a checkpoint, and those that stay."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Literal

from hp_checkpoint.disk.manifest import MANIFEST, Manifest
from hp_checkpoint.disk.storage import new_nonce, part_folder, read_json
from hp_checkpoint.errors import InvalidCheckpointError

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The checkpoints that stay when a new one is complete; later steps than its own are left alone.

    Those are of a training that went on from an older checkpoint: because they can't be read, or to try something else.

    Attributes:
        last: so many of the newest up to the new one. Default 2.
        every: those whose step is a multiple of it as well. Default None: no others.
        best: so many with the best metrics as well, of equal ones the older; one without a metric, or with NaN, is
            never among them. Default None: none.
        better: whether "smaller" metrics are better, as of a loss, or "larger" ones.

    Raises:
        TypeError: what is no number.
        ValueError: a number below 1, or another word.
    """

    last: int = 2
    every: int | None = None
    best: int | None = None
    better: Literal["smaller", "larger"] = "smaller"

    def __post_init__(self) -> None:
        given = (number for number in (self.last, self.every, self.best) if number is not None)
        if not all(isinstance(number, int) for number in given) or self.last is None:
            raise TypeError(f"{self}: last, every and best must be whole numbers")
        if any(number is not None and number < 1 for number in (self.last, self.every, self.best)):
            raise ValueError(f"{self}: last, every and best must be at least 1")
        if self.better not in ("smaller", "larger"):
            raise ValueError(f"{self}: better must be 'smaller' or 'larger'")

    def removed(
        self, steps: Iterable[int], saved: int | None = None, metrics: Mapping[int, float | None] | None = None
    ) -> list[int]:
        """Return the steps that don't stay.

        >>> Keep(last=1, every=100).removed([100, 150, 200, 250])
        [150]
        >>> Keep(last=1).removed([100, 150, 200, 250], saved=150)
        [100]
        >>> Keep(last=1, best=1).removed([100, 150, 200], metrics={100: 2.5, 150: 2.0, 200: 2.25})
        [100]

        Args:
            steps: that have a checkpoint.
            saved: the step that was saved just now. Default None: the newest.
            metrics: of the steps that have one, for ``best``. Default None: of none.
        """
        ordered = sorted(step for step in steps if saved is None or step <= saved)
        best = self._best(ordered, metrics or {})
        return [step for step in ordered[: -self.last] if step not in best and (not self.every or step % self.every)]

    def _best(self, steps: list[int], metrics: Mapping[int, float | None]) -> set[int]:
        known = {step: value for step in steps if (value := metrics.get(step)) is not None and not isnan(value)}
        sign = 1 if self.better == "smaller" else -1
        return set(sorted(known, key=lambda step: sign * known[step])[: self.best or 0])


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in that of a run."""
    return folder / f"step-{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """List the steps that have a checkpoint in a run's folder, ascending."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step-*") if (path / MANIFEST).exists())
    return sorted(int(match[1]) for match in matches if match)


def prune(folder: Path, keep: Keep, saved: int | None = None) -> list[int]:
    """Remove the checkpoints of a run that don't stay, and return their steps.

    Where metrics are compared, a checkpoint whose manifest is damaged or of a newer version stays: it may be the best.

    Args:
        folder: of the run.
        keep: what stays.
        saved: the step that was saved just now. Default None: the newest.
    """
    steps = steps_in(folder)
    metrics, unknown = ({}, set()) if keep.best is None else metrics_in(folder, steps)
    removed = [step for step in keep.removed(steps, saved, metrics) if step not in unknown]
    for step in removed:
        remove(step_folder(folder, step))
    return removed


def metrics_in(folder: Path, steps: Iterable[int]) -> tuple[dict[int, float | None], set[int]]:
    """Return the metrics of checkpoints, None where one has none, and the steps whose manifest can't be read."""
    metrics: dict[int, float | None] = {}
    unknown: set[int] = set()
    for step in steps:
        path = step_folder(folder, step) / MANIFEST
        try:
            metrics[step] = Manifest.from_bytes(read_json(path), str(path)).metric
        except FileNotFoundError:  # another process removed it
            metrics[step] = None
        except InvalidCheckpointError:
            unknown.add(step)
    return metrics, unknown


def remove(folder: Path) -> None:
    """Remove a checkpoint; what an interruption leaves is none, and the next save removes it.

    Of a link, what it leads to stays. Another process may have removed it just before: the command ``prune`` beside a
    training.
    """
    rest = part_folder(folder, new_nonce())
    with suppress(FileNotFoundError):
        if folder.is_symlink():
            folder.unlink()
            return
        os.rename(folder, rest)
    shutil.rmtree(rest, ignore_errors=True)
