"""What a stage keeps of a micro-batch, or of a slice of it, between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hp_pipeline.channels import Message
from hp_pipeline.port import Arrival, port
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
        joined: inputs that had memory in common in the stage that they came from: that stage, the input, its version.
    """

    __slots__ = ("arrivals", "deferred", "gradients", "joined", "outputs", "state", "swap")

    def __init__(self) -> None:
        self.arrivals: list[Arrived] = []
        self.outputs: Message | None = None
        self.gradients: dict[int, Sequence[Any]] = {}
        self.deferred: Any = None
        self.swap: Any = None
        self.state: SequenceState | None = None
        self.joined: list[tuple[int, Any, int]] = []

    def watch_joined(self, source: int, tensors: Sequence[Any]) -> None:
        """Note inputs that were views of the same memory where they came from: here each has its own."""
        self.joined += [(source, tensor, port().version(tensor)) for tensor in tensors]

    def check_joined(self, stage: int) -> None:
        """Refuse a write to one of them.

        Raises:
            ValueError: the stage wrote to one.
        """
        joined, self.joined = self.joined, []
        for source, tensor, version in joined:
            if port().version(tensor) != version:
                raise ValueError(
                    f"stage {stage} wrote in place to an input that has memory in common with another one, as views of"
                    f" one tensor in stage {source} have: write to a clone() of it, or pass the whole tensor once"
                )


class Arrived(NamedTuple):
    """A message at the root of a stage's graph; `places` are those of its tensors among its leaves."""

    source: int
    arrival: Arrival
    places: list[int]
    message: Message
