"""Protocols that a framework implements for the command line: starting ranks, training, writing checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hp_plan import ParallelPlan
from hp_platform.extend import load_port
from hyper_parallel.data import Rows
from hyper_parallel.launch import Job, Place

Result = TypeVar("Result")


class Launcher(Protocol):
    """Starting ranks on this machine; `<framework>/launch.py`."""

    def start_server(self, plan: ParallelPlan, ranks: int) -> None:
        """Prepare for so many ranks while the plan is checked."""
        ...

    def launch(self, work: Callable[[Job], Result], job: Job, *, ranks: int) -> dict[int, Result]:
        """Run a function of a module's top level on every rank; get what each returned."""
        ...


class Process(Protocol):
    """The process of a rank; `<framework>/process.py`."""

    def prepare(self, place: Place) -> None:
        """Choose the device and how many threads to run, before the first tensor."""
        ...

    def peer_lost(self, error: Exception) -> bool:
        """Tell whether an error says that another rank has gone."""
        ...


class Trainer(Protocol):
    """A model under training, with its optimizer and schedule."""

    model: Any
    optimizer: Any
    schedule: Any
    name: str
    size: int

    @property
    def lr(self) -> float:
        """Get the learning rate of the next step."""
        ...

    def step(self, rows: Rows) -> tuple[float | None, float]:
        """Train on this rank's samples; get its loss, if it has one, and the norm of the gradient."""
        ...


class Training(Protocol):
    """Training a model and saving it; `<framework>/trainer.py`."""

    def Trainer(self, plan: ParallelPlan) -> Trainer:
        """Build the plan's model, with its optimizer and schedule."""
        ...

    def write_sample(self, plan: ParallelPlan, folder: Path) -> str | None:
        """Let the model of a checkpoint write on, on rank 0; None where it can't."""
        ...


def launcher() -> Launcher:
    """Get the framework's way to start ranks."""
    return load_port(Launcher, "launch")


def rank_process() -> Process:
    """Get what the framework asks of a rank's process."""
    return load_port(Process, "process")


def training() -> Training:
    """Get the framework's way to train a model and to save it."""
    return load_port(Training, "trainer")
