"""What a rank does in a pipeline, as data: a step, and the order of steps by rank.

Note [How steps are written]
    In texts (errors, tables, pictures) a step is its stage, its type and its micro-batch: ``2F0`` is the forward of
    stage 2 for micro-batch 0, and ``2F0.1`` that of its slice 1 of the sequence. Two steps that run together are
    written with a plus: ``2F3+1B0``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import NamedTuple


class MetaStepType(enum.Enum):
    """Types of steps; a value is the short form of a type in texts.

    ``BACKWARD`` is the whole backward of a stage; ``BACKWARD_INPUT`` computes the gradients of the stage's inputs
    alone and ``BACKWARD_WEIGHT`` those of its weights, later. The overlapped types have two ``sub_steps``, in the
    order of their names. Sends and receives name the stage of their own rank: ``FWD_RECV`` of stage 2 receives what
    stage 2 takes, ``BWD_SEND`` of stage 2 sends the gradients of what it took.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    OVERLAP_F_B = "OFB"
    OVERLAP_B_F = "OBF"
    FWD_SEND = "FS"
    FWD_RECV = "FR"
    BWD_SEND = "BS"
    BWD_RECV = "BR"
    UNSHARD = "FU"
    RESHARD = "FRS"
    REDUCE_GRAD = "FG"
    OFFLOAD = "SO"
    WAIT_OFFLOAD = "SW"
    LOAD = "SL"
    WAIT_LOAD = "SR"

    __hash__ = object.__hash__  # steps are keys everywhere; Enum's own hash is a Python function


_KINDS = {kind.value: kind for kind in MetaStepType}
_SHORT = re.compile(r"(?P<stage>\d+)(?P<kind>[A-Z]+)(?P<micro>\d*)(\.(?P<part>\d+))?")


class MetaStep(NamedTuple):
    """One step of a rank. Immutable and hashable; its ``repr`` is its constructor.

    Attributes:
        micro_index: the micro-batch, from 0; None for composites and for steps of a whole stage.
        step_type: what is done.
        stage_index: the stage, counted over all ranks; None for composites.
        sub_steps: of a composite, the two steps that run together; None otherwise.
        seq_index: the slice of the sequence, from 0; 0 where sequences are not sliced.
    """

    micro_index: int | None
    step_type: MetaStepType
    stage_index: int | None
    sub_steps: tuple[MetaStep, ...] | None = None
    seq_index: int = 0

    @classmethod
    def of(cls, text: str) -> MetaStep:
        """Read a step from its short form: ``MetaStep.of("2F0.1")`` is stage 2's forward of slice 1 of micro-batch 0.

        Raises:
            ValueError: the text is no step.
        """
        parts = text.split("+")
        if len(parts) == 2:
            first, second = map(cls.of, parts)
            ahead = first.step_type is MetaStepType.FORWARD
            kind = MetaStepType.OVERLAP_F_B if ahead else MetaStepType.OVERLAP_B_F
            return cls(None, kind, None, (first, second))
        match = _SHORT.fullmatch(text)
        if match is None or match["kind"] not in _KINDS:
            raise ValueError(
                f"{text!r} is not a step; a step is its stage, its type and its micro-batch, such as '2F0'."
            )
        micro = int(match["micro"]) if match["micro"] else None
        return cls(micro, _KINDS[match["kind"]], int(match["stage"]), None, int(match["part"] or 0))

    def __str__(self) -> str:
        """Write the step as in Note [How steps are written]."""
        if self.sub_steps:
            return "+".join(map(str, self.sub_steps))
        micro = "" if self.micro_index is None else self.micro_index
        part = f".{self.seq_index}" if self.seq_index else ""
        return f"{self.stage_index}{self.step_type.value}{micro}{part}"


Order = Mapping[int, tuple[MetaStep, ...]]
"""The steps of each pipeline rank, in the order in which it runs them."""

_T = MetaStepType
COMPUTE = frozenset({_T.FORWARD, _T.BACKWARD, _T.BACKWARD_INPUT, _T.BACKWARD_WEIGHT})
TRANSFERS = frozenset({_T.FWD_SEND, _T.FWD_RECV, _T.BWD_SEND, _T.BWD_RECV})
SWAPPING = frozenset({_T.OFFLOAD, _T.WAIT_OFFLOAD, _T.LOAD, _T.WAIT_LOAD})
SHARDING = frozenset({_T.UNSHARD, _T.RESHARD, _T.REDUCE_GRAD})
BACKWARDS = frozenset({_T.BACKWARD, _T.BACKWARD_INPUT})
"""The types after which the gradients of a stage's inputs are there."""


def compute_parts(each: MetaStep) -> tuple[MetaStep, ...]:
    """List the steps that a step consists of: the two of a composite, else itself."""
    return each.sub_steps or (each,)


def computing(order: Order) -> dict[int, tuple[MetaStep, ...]]:
    """Leave of an order the steps that compute."""
    return {
        rank: tuple(each for each in steps if each.sub_steps or each.step_type in COMPUTE)
        for rank, steps in order.items()
    }
