"""A pipeline and the steps of its ranks, as data: stages, costs, and the order of steps, with sends and receives.

Note [How steps are written]
    In texts (errors, tables, pictures) a step is its stage, its type and its micro-batch: ``2F0`` is the forward of
    stage 2 for micro-batch 0, and ``2F0.1`` that of its slice 1 of the sequence. Two steps that run together are
    written with a plus: ``2F3+1B0``.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


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


PerStage = float | tuple[float, ...]
Shape = Literal["line", "loop", "v", "w"]


@dataclass(frozen=True)
class Costs:
    """What the steps of a stage cost. A number is every stage's; a tuple has one entry a stage.

    Attributes:
        forward: seconds of a forward of one micro-batch (of one slice, where sequences are sliced).
        input: seconds of the backward for the inputs.
        weight: seconds of the backward for the weights; a whole backward takes both.
        send: seconds that a message between two ranks is under way.
        saved: bytes that a forward saves for its backward.
        held: bytes of them that are still there between the two halves of a split backward.
        static: bytes that a stage takes at all times (parameters, gradients, optimizer states).
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    send: float = 0.0
    saved: PerStage = 1.0
    held: PerStage = 1.0
    static: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "send", "saved", "held", "static"):
            value = getattr(self, name)
            if any(each < 0 for each in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"Costs: {name} must not be negative, got {value}.")

    def of(self, name: str, stages: int) -> tuple[float, ...]:
        """List one of the costs by stage."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * stages


UNIT = Costs()
"""Forward, and each half of a backward, one second; a forward saves one byte; messages take no time."""


@dataclass(frozen=True)
class Pipeline:
    """What a schedule is made for.

    Attributes:
        placement: the pipeline rank of each stage, by stage; every rank from 0 has at least one. A rank may itself be
            several devices.
        micro_batches: into how many a batch is cut, at least 1.
        seq_slices: into how many slices each sequence is cut; 1 leaves it whole.
        cost: of the stages.
        boundaries: pairs of stages (from, to), the second of which takes what the first passes on; each leads to a
            higher stage. None is a line: each stage takes what the one before passes on. Other pairs make skip
            connections, or an encoder whose chain joins that of a language model.
        has_backward: False for inference: forwards only.
    """

    placement: tuple[int, ...]
    micro_batches: int
    seq_slices: int = 1
    cost: Costs = UNIT
    boundaries: tuple[tuple[int, int], ...] | None = None
    has_backward: bool = True
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = len(self.placement)
        if sorted(set(self.placement)) != list(range(max(self.placement, default=-1) + 1)) or not stages:
            raise ValueError(
                f"Pipeline: placement is the rank of each stage and must name every rank from 0, got {self.placement}."
            )
        if self.micro_batches < 1 or self.seq_slices < 1:
            raise ValueError(
                "Pipeline: micro_batches and seq_slices must be at least 1, got"
                f" {self.micro_batches} and {self.seq_slices}."
            )
        for name in ("forward", "input", "weight", "saved", "held", "static"):
            if len(self.cost.of(name, stages)) != stages:
                entries = len(self.cost.of(name, stages))
                raise ValueError(f"Pipeline: Costs.{name} has {entries} entries for {stages} stages.")
        pairs = self.boundaries
        if pairs is None:
            pairs = tuple((stage, stage + 1) for stage in range(stages - 1))
        for source, target in pairs:
            if not 0 <= source < target < stages:
                raise ValueError(
                    f"Pipeline: the boundary ({source}, {target}) must lead to a higher stage of the {stages} there"
                    " are."
                )
        before = tuple(tuple(sorted(a for a, b in set(pairs) if b == stage)) for stage in range(stages))
        after = tuple(tuple(sorted(b for a, b in set(pairs) if a == stage)) for stage in range(stages))
        object.__setattr__(self, "predecessors", before)
        object.__setattr__(self, "successors", after)

    @property
    def ranks(self) -> int:
        """Count the pipeline ranks."""
        return max(self.placement) + 1

    @functools.cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """List the stages of each rank, in their order."""
        listed: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.placement):
            listed[rank].append(stage)
        return tuple(map(tuple, listed))

    @functools.cached_property
    def seconds(self) -> dict[MetaStepType, tuple[float, ...]]:
        """Seconds of each type of computing step, by stage; a whole backward takes both its halves."""
        forward, inputs, weights = (self.cost.of(name, len(self.placement)) for name in ("forward", "input", "weight"))
        return {
            MetaStepType.FORWARD: forward,
            MetaStepType.BACKWARD_INPUT: inputs,
            MetaStepType.BACKWARD_WEIGHT: weights,
            MetaStepType.BACKWARD: tuple(a + b for a, b in zip(inputs, weights, strict=True)),
        }

    def remote(self, stage: int, others: Sequence[int]) -> tuple[int, ...]:
        """List those of the other stages that are on another rank than a stage."""
        rank = self.placement[stage]
        return tuple(other for other in others if self.placement[other] != rank)


def placed(shape: Shape, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Place stages on ranks.

    Args:
        shape: ``"line"``: one stage a rank; ``"loop"``: the ranks from first to last, over and over; ``"v"``: there and
            back again; ``"w"``: there and back twice.
        ranks: the pipeline ranks, at least 1.
        chunks: stages a rank, for ``"loop"``, by default 2; for the others it follows from the shape.

    Returns:
        The rank of each stage.

    Raises:
        ValueError: another number of chunks than the shape has, or no ranks.
    """
    own = {"line": 1, "loop": chunks or 2, "v": 2, "w": 4}
    if shape not in own:
        raise ValueError(f"placed: shape is one of {sorted(own)}, got {shape!r}.")
    if ranks < 1 or own[shape] < 1 or chunks not in (None, own[shape]):
        raise ValueError(f"placed: {shape!r} on {ranks} ranks has {own[shape]} stages a rank, got chunks={chunks}.")
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    legs = [there if shape in ("line", "loop") or not leg % 2 else back for leg in range(own[shape])]
    return tuple(rank for leg in legs for rank in leg)


Piece = tuple[int | None, int]
_GRADIENTS = frozenset({_T.BACKWARD, _T.BACKWARD_WEIGHT})


def is_lowered(order: Order) -> bool:
    """Tell whether sends and receives are among an order's steps."""
    return any(step.step_type in TRANSFERS for steps in order.values() for step in steps)


def lower(order: Order, pipeline: Pipeline, *, sharded: Collection[int] = (), swapped: Collection[int] = ()) -> Order:
    """Add to the computing steps of each rank all others that they ask for.

    A receive stands before the step that needs it, a send after the step that makes what is sent; what passes between
    two stages of one rank is neither. The runtime posts receives before it comes to them and does not wait for sends,
    so that their places only say in which order messages are on each channel: that in which they are made. Where a rank
    takes them in another, it receives those that come earlier too.

    Args:
        order: computing steps by rank.
        pipeline: what it is for.
        sharded: stages whose parameters are sharded: they are gathered before a stage's first step in each run of its
            steps, and their gradients are reduced once, after its last.
        swapped: stages whose saved tensors go to the host between forward and backward, unless the one follows the
            other: while the next step computes, and back while the one before the backward does.

    Returns:
        The order with all steps; an order that has sends or receives comes back as it is.
    """
    if is_lowered(order):
        return order
    pieces = _pieces(order)
    return {rank: _lowered(steps, pipeline, pieces, set(sharded), set(swapped)) for rank, steps in order.items()}


def _pieces(order: Order) -> dict[tuple[int | None, bool], list[Piece]]:
    """List, for each stage and direction, the pieces of the batch in the order in which the stage computes them."""
    pieces: dict[tuple[int | None, bool], list[Piece]] = defaultdict(list)
    for steps in order.values():
        for step in steps:
            for micro, kind, stage, _, part in compute_parts(step):
                if kind is _T.FORWARD or kind in BACKWARDS:
                    pieces[stage, kind is _T.FORWARD].append((micro, part))
    return pieces


def _lowered(
    steps: tuple[MetaStep, ...],
    pipeline: Pipeline,
    pieces: Mapping[tuple[int | None, bool], list[Piece]],
    sharded: set[int],
    swapped: set[int],
) -> tuple[MetaStep, ...]:
    placement, result = pipeline.placement, []
    due: dict[tuple[int, bool], deque[Piece]] = {}

    def receive(stage: int, ahead: bool, piece: Piece) -> None:
        """Receive a piece, and first those that are made before it."""
        if (stage, ahead) not in due:
            others = (pipeline.predecessors if ahead else pipeline.successors)[stage]
            due[stage, ahead] = deque(pieces[pipeline.remote(stage, others)[0], ahead])
        waiting = due[stage, ahead]
        kind = _T.FWD_RECV if ahead else _T.BWD_RECV
        while piece in waiting:
            micro, part = waiting.popleft()
            result.append(MetaStep(micro, kind, stage, None, part))

    far_before = [bool(pipeline.remote(stage, pipeline.predecessors[stage])) for stage in range(len(placement))]
    far_after = [bool(pipeline.remote(stage, pipeline.successors[stage])) for stage in range(len(placement))]
    last = {part.stage_index: index for index, step in enumerate(steps) for part in compute_parts(step)}
    gradients = {part.stage_index for step in steps for part in compute_parts(step) if part.step_type in _GRADIENTS}
    gathered: set[int | None] = set()
    ahead, behind, leaving = _swaps(steps, swapped) if pipeline.has_backward else ({}, {}, {})
    for index, step in enumerate(steps):
        after: list[MetaStep] = []
        result += ahead.get(index, ())
        needed = {part.stage_index for part in compute_parts(step)} & sharded
        if needed - gathered:
            result += _of_stages(_T.RESHARD, gathered - needed) + _of_stages(_T.UNSHARD, needed - gathered)
            gathered = needed
        for micro, kind, stage, _, part in compute_parts(step):
            if stage is None or not 0 <= stage < len(placement):  # ``check`` says so
                continue
            if kind is _T.FORWARD:
                if far_before[stage]:
                    receive(stage, True, (micro, part))
                if far_after[stage]:
                    after.append(MetaStep(micro, _T.FWD_SEND, stage, None, part))
            elif kind in BACKWARDS:
                if far_after[stage]:
                    receive(stage, False, (micro, part))
                if far_before[stage]:
                    after.append(MetaStep(micro, _T.BWD_SEND, stage, None, part))
        result += [step, *after, *behind.get(index, ()), *leaving.get(index, ())]
        result += _of_stages(_T.REDUCE_GRAD, {stage for stage in needed & gradients if last[stage] == index})
    return (*result, *_of_stages(_T.RESHARD, gathered))


def _of_stages(kind: MetaStepType, stages: Collection[int | None]) -> list[MetaStep]:
    return [MetaStep(None, kind, stage) for stage in sorted(stages)]  # type: ignore[type-var]


Added = dict[int, list[MetaStep]]


def _swaps(steps: Sequence[MetaStep], swapped: set[int]) -> tuple[Added, Added, Added]:
    """List the steps that swap: before the step at a place, after it, and after those."""
    ahead: Added = defaultdict(list)
    behind: Added = defaultdict(list)
    leaving: Added = defaultdict(list)
    forwards: dict[tuple[int | None, int | None, int], int] = {}
    for index, step in enumerate(steps):
        for micro, kind, stage, _, part in compute_parts(step):
            if stage not in swapped:
                continue
            if kind is _T.FORWARD:
                forwards[stage, micro, part] = index
            elif kind in BACKWARDS and (place := forwards.get((stage, micro, part), index)) < index - 1:
                leaving[place].append(MetaStep(micro, _T.OFFLOAD, stage, None, part))
                behind[place + 1].append(MetaStep(micro, _T.WAIT_OFFLOAD, stage, None, part))
                ahead[max(index - 1, place + 2)].append(MetaStep(micro, _T.LOAD, stage, None, part))
                ahead[index].append(MetaStep(micro, _T.WAIT_LOAD, stage, None, part))
    return ahead, behind, leaving
