"""The steps of a run that are profiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hp_plan import ParallelPlan
from hyper_parallel.port import Profiler, Trainer, profiling

PROFILE = "profile"


class Profile:
    """The steps of a plan's `[profile]`, on this rank.

    Args:
        plan: the run's.
        trainer: whose model's modules are named in the trace.
        folder: of the run.
        rank: this process's.
    """

    def __init__(self, plan: ParallelPlan, trainer: Trainer, folder: Path, *, rank: int) -> None:
        section = plan.profile
        here = section.start is not None and rank in section.ranks
        self._first = section.start if here else None
        self._last = (section.start or 0) + section.steps - 1
        self._model, self._path = trainer.model, folder / PROFILE / f"rank-{rank}.json"
        self._profiler: Profiler | None = None

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record a step if it is one of those to profile; the trace is written after the last of them."""
        if step == self._first:
            self._path.parent.mkdir(exist_ok=True)
            self._profiler = profiling().Profiler(self._model, self._path)
        if self._profiler is None:
            yield
            return
        with self._profiler.named(f"hp.step {step}"):
            yield
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Write what is recorded, of a run that ended before the last of its profiled steps."""
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
