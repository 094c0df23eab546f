"""What a copy has of a step: the state that the next one rests on, and the numbers of the step itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.port import Numbers, Pending, Trainer, copying


@dataclass
class Launched:
    """A step whose numbers may be on their way.

    Attributes:
        step: which.
        lr: its learning rate.
        numbers: of all ranks: loss, norm, memory, wait for data, operations, tokens, whether asked to stop.
        begun: when.
        ended: when the next one begun, or its numbers were there.
        readings: of the monitor, if the step is one that is read.
        faults: silent data corruption that was found in it; None where that is not settled yet.
    """

    step: int
    lr: float
    numbers: Numbers
    begun: float
    ended: float | None = None
    readings: Pending | None = None
    faults: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Kept:
    """The numbers of a step, as a copy has them."""

    values: np.ndarray

    def read(self) -> np.ndarray:
        """Return them as [ranks, numbers]."""
        return self.values

    def ready(self) -> bool:
        """Return True."""
        return True


def kept(trainer: Trainer, launched: Launched, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a copy has of a step; its numbers are waited for.

    Args:
        trainer: after the step's update.
        launched: the step.
        data: the position in the data.
    """
    values = launched.numbers.read()
    return {
        **copying().state_of(trainer.model, trainer.optimizer),
        "schedule": trainer.schedule.state_dict(),
        "data": dict(data),
        "numbers": np.ascontiguousarray(values),
        "columns": values.shape[1],
        "lr": launched.lr,
        "seconds": time.perf_counter() - launched.begun,
        "faults": launched.faults,
    }


def take(trainer: Trainer, step: int, state: Mapping[str, Any]) -> tuple[Launched, dict[str, Any]]:
    """Give a new trainer the state of a copy; return the copy's step as if it were launched, and its position.

    Args:
        trainer: that has taken no step.
        step: of the copy.
        state: what `kept` returned, with bytes in the places of tensors.
    """
    copying().fill(trainer.model, trainer.optimizer, state)
    trainer.schedule.load_state_dict(state["schedule"])
    values = np.array(state["numbers"]).view(np.float64).reshape(-1, state["columns"])
    faults = None if state["faults"] is None else tuple(state["faults"])
    launched = Launched(step, state["lr"], _Kept(values), 0.0, ended=state["seconds"], faults=faults)
    return launched, state["data"]
