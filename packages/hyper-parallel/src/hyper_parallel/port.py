"""Protocols that a framework implements for the command line: starting ranks, training, writing checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_checkpoint.extend import Adapter
from hp_pipeline.extend import Operations
from hp_plan import Origin, ParallelPlan
from hp_plan.extend import Computed, Unequal
from hp_platform.extend import Place, load_port
from hyper_parallel.data import Rows
from hyper_parallel.launching.launch import Job
from hyper_parallel.supervision.run_end import Spot, Storage

Result = TypeVar("Result")
Scalar = Any
"""A number, or a tensor that will have it."""


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


class Pending(Protocol):
    """Readings of a step, on their way to the host."""

    def records(self, step: int, number: Callable[[str], int]) -> NDArray[Any]:
        """Wait for them; get them as records, with the numbers of their names."""
        ...


class Capture(Protocol):
    """What is read of a model in training; `hp_plan.<framework>.training.monitor`."""

    def layout(self) -> dict[str, Any]:
        """Describe what decides which part of a tensor a rank has."""
        ...

    def begin(self, step: int) -> None:
        """Begin a step, which may be one to read."""
        ...

    def take(self, loss: Scalar | None) -> Pending | None:
        """Get the step's readings, with this rank's loss; None of one that is not read."""
        ...


class Replay(Protocol):
    """The bits of what a step computes; `hp_plan.<framework>.training.replay`."""

    def reading(self, part: int | None = None) -> AbstractContextManager[None]:
        """Read the gradients that are computed inside, of a part of the batch or of this rank's own."""
        ...

    def take(self, loss: Scalar | None) -> Computed:
        """Get what was read, with this rank's loss."""
        ...

    def copy_buffers(self) -> Any:
        """Copy the model's buffers."""
        ...

    def put_buffers(self, buffers: Any) -> None:
        """Put them back."""
        ...


class Replicas(Protocol):
    """What several ranks hold of weights and states; `hp_plan.<framework>.training.replicas`."""

    def compare(self) -> list[Unequal]:
        """Get the copies that differ."""
        ...

    def mend(self, unequal: Sequence[Unequal]) -> None:
        """Overwrite the copies that few ranks have by that of most."""
        ...


class Trainer(Protocol):
    """A model under training, with its optimizer and schedule."""

    model: Any
    optimizer: Any
    schedule: Any
    name: str
    size: int
    trained: int
    adapter: Adapter | None

    @property
    def lr(self) -> float:
        """Get the learning rate of the next step."""
        ...

    operations: Operations | None
    measures: Sequence[str]
    measured: Sequence[Scalar] | None

    def gradients(self, rows: Rows) -> tuple[Scalar | None, Scalar]:
        """Compute gradients of this rank's samples; get its loss, if it has one, and their norm, maybe to come."""
        ...

    @property
    def replay(self) -> Replay | None:
        """Get what reads the bits that are computed; None where nothing is computed again."""
        ...

    @property
    def replicas(self) -> Replicas | None:
        """Get what compares copies of weights and states; None where they aren't compared."""
        ...

    @property
    def capture(self) -> Capture | None:
        """Get what is read of the model; None of a run that is not monitored."""
        ...

    def origin(self, rows: Rows) -> Origin | None:
        """Compute gradients once more, and get where this rank's first NaN or infinity was born."""
        ...

    def update(self) -> None:
        """Take the optimizer's step, and what follows it."""
        ...

    def experts(self, *, loads: bool = True) -> dict[str, Any] | None:
        """Get the replicas of experts, and the tokens they got, for which all ranks call it; None without replicas."""
        ...

    def go_on(self, step: int, experts: Mapping[str, Any] | None) -> None:
        """Go on after a step that was loaded, with the experts as they were."""
        ...

    def evaluate(self, rows: Rows) -> tuple[Sequence[float], float]:
        """Get the loss of this rank's samples and what is measured beside it, and the mean number of labels of a rank.

        Nothing is trained.
        """
        ...

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """Let the model go on with tokens; all ranks together."""
        ...


class Training(Protocol):
    """Training a model and saving it; `<framework>/trainer.py`."""

    def Trainer(self, plan: ParallelPlan, *, weights: bool = True) -> Trainer:
        """Build the plan's model, with its optimizer and schedule; without weights where a copy is going to fill it."""
        ...

    def write_sample(self, plan: ParallelPlan, folder: Path) -> str | None:
        """Let the model of a checkpoint write on, on rank 0; None where it can't."""
        ...


class Merging(Protocol):
    """Merging an adapter into its model; `torch/merging.py`."""

    def merge(self, folder: Path, target: Path, *, base: Path, dtype: str | None) -> None:
        """Write the model of a folder with the adapter of a checkpoint in its weights."""
        ...


class Copying(Protocol):
    """What a copy has of a training; `torch/copied.py`."""

    def state_of(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Get this rank's tensors that a step changes, and values of JSON."""
        ...

    def fill(self, model: Any, optimizer: Any, state: Mapping[str, Any]) -> None:
        """Set what `state_of` got in another process, with bytes in the places of tensors."""
        ...

    def forget(self) -> None:
        """Let go of what is under way of models whose ranks are lost."""
        ...


class Numbers(Protocol):
    """Numbers of all ranks, on their way to the host."""

    def read(self) -> NDArray[np.float64]:
        """Wait for them; get them as [ranks, numbers]."""
        ...

    def ready(self) -> bool:
        """Tell whether they are there."""
        ...


class Gathering(Protocol):
    """Gathering numbers of all ranks; `<framework>/trainer.py`."""

    def Numbers(self, own: Sequence[Scalar]) -> Numbers:
        """Send this rank's numbers, and receive those of all."""
        ...


def copying() -> Copying:
    """Get the framework's way to copy a training's state."""
    return load_port(Copying, "copied")


def gathering() -> Gathering:
    """Get the framework's way to gather numbers."""
    return load_port(Gathering, "trainer")


class Profiler(Protocol):
    """A profile that is under way."""

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Name what runs inside."""
        ...

    def close(self) -> None:
        """Stop, and write the trace."""
        ...


class Profiling(Protocol):
    """Profiles; `torch/trainer.py`."""

    def Profiler(self, model: Any, path: Path) -> Profiler:
        """Begin a profile whose trace will be at a path."""
        ...


class Shortages(Protocol):
    """Memory that ran out; `<framework>/process.py`."""

    def ran_out(self, error: BaseException) -> bool:
        """Tell whether an error says that."""
        ...

    def place(self, error: BaseException, model: Any) -> Spot:
        """Get where in a step it was raised."""
        ...

    def storages(self, error: BaseException, model: Any, optimizer: Any) -> list[Storage]:
        """List the largest storages that are in use."""
        ...


def profiling() -> Profiling:
    """Get the framework's profiles."""
    return load_port(Profiling, "trainer")


def shortages() -> Shortages:
    """Get the framework's look at memory that ran out."""
    return load_port(Shortages, "process")


def launcher() -> Launcher:
    """Get the framework's way to start ranks."""
    return load_port(Launcher, "launch")


def rank_process() -> Process:
    """Get what the framework asks of a rank's process."""
    return load_port(Process, "process")


def merging() -> Merging:
    """Get the framework's way to merge an adapter into its model."""
    return load_port(Merging, "merging")


def training() -> Training:
    """Get the framework's way to train a model and to save it."""
    return load_port(Training, "trainer")
