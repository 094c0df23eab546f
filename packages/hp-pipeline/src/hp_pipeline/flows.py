"""What a stage keeps of a micro-batch, or of a slice of it, between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hp_pipeline.channels import Message
from hp_pipeline.port import Arrival
from hp_pipeline.slices import SequenceState

__all__ = ["Arrived", "Flow"]


class Flow:
    """What a stage keeps of one piece between its steps.

    Attributes:
        arrivals: what came from the stages before.
        outputs: what the stage returned, until backward.
        gradients: for the outputs, one list of leaves from each stage after it, by that stage.
        deferred: the gradients of weights that backward put off.
        swap: what moves saved tensors to the host and back; None where they stay.
        state: what slices of the sequence pass on to each other; None where sequences are whole.
    """

    __slots__ = ("arrivals", "deferred", "gradients", "outputs", "state", "swap")

    def __init__(self) -> None:
        self.arrivals: list[Arrived] = []
        self.outputs: Message | None = None
        self.gradients: dict[int, Sequence[Any]] = {}
        self.deferred: Any = None
        self.swap: Any = None
        self.state: SequenceState | None = None


class Arrived(NamedTuple):
    """A message at the root of a stage's graph; `places` are those of its tensors among its leaves."""

    source: int
    arrival: Arrival
    places: list[int]
    message: Message
