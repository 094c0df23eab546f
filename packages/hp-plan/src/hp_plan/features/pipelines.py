"""A plan's pipeline: its stages, its order of steps, and their simulation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from hp_pipeline import Costs, Order, Pipeline, Split, Trace, placed, simulate, split_model, synthesize
from hp_pipeline.extend import Shape, SplitError, schedules
from hp_plan.features.homes import in_groups
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import BYTES, training_bytes
from hp_platform import get_platform

# For each schedule the shape in which it places stages, and the function that writes its order.
ORDERS: dict[str, tuple[Shape, Callable[[Pipeline], Order]]] = {
    "gpipe": ("line", schedules.gpipe),
    "1f1b": ("line", schedules.one_f_one_b),
    "interleaved": ("loop", schedules.interleaved),
    "looped-bfs": ("loop", schedules.looped_bfs),
    "zb1p": ("line", schedules.zb1p),
    "zb2p": ("line", schedules.zb2p),
    "zbv": ("v", schedules.zbv),
    "v-half": ("v", schedules.v_half),
    "v-min": ("v", schedules.v_min),
    "dualpipev": ("v", schedules.dual_pipe_v),
    "hanayo": ("w", schedules.hanayo),
}
_STAGES_A_RANK: dict[Shape, int] = {shape: len(placed(shape, 1)) for shape in get_args(Shape)}


@dataclass(frozen=True)
class Choice:
    """An order for a plan's pipeline.

    Attributes:
        name: of the schedule, or `"auto"`.
        split: the stages.
        pipeline: what the order is for, with the counted costs of its stages.
        order: computing steps by rank.
    """

    name: str
    split: Split
    pipeline: Pipeline
    order: Order

    @functools.cached_property
    def trace(self) -> Trace:
        """The order on clocks."""
        return simulate(self.order, self.pipeline)


@dataclass(frozen=True)
class Outlook:
    """The simulated pipeline of a plan.

    Attributes:
        choice: the plan's order.
        best: the fastest order that needs no more memory than that, of all schedules; None if the plan's is.
    """

    choice: Choice
    best: Choice | None


def outlook(plan: ParallelPlan, model: Any) -> Outlook:
    """Simulate a plan's pipeline, and look for a faster one.

    Args:
        plan: whose mesh has an axis `pp`.
        model: the plan's, on any device, such as `build_empty` makes it.

    Raises:
        PlanError: the model can't be split as the plan says.
    """
    choice = choose_order(plan, model)
    best = _Search(plan, model).fastest(max(choice.trace.peaks))
    return Outlook(choice, best if best.trace.makespan < 0.999 * choice.trace.makespan else None)


def choose_order(plan: ParallelPlan, model: Any) -> Choice:
    """Split the model, and write the order of the plan's schedule.

    `"auto"` is the fastest that needs no more memory than 1F1B, or than interleaved 1F1B where the plan lists as many
    stages.

    Args:
        plan: the plan.
        model: the whole model.

    Raises:
        PlanError: the model can't be split as the plan says.
    """
    search, stages = _Search(plan, model), stage_count(plan)
    if plan.pipeline.schedule != "auto":
        shape, write = ORDERS[plan.pipeline.schedule]
        return search.choice(plan.pipeline.schedule, shape, stages, write)
    usual = "1f1b" if stages == plan.mesh.pp else "interleaved"
    shape, write = ORDERS[usual]
    return search.fastest(max(search.choice(usual, shape, stages, write).trace.peaks))


class _Search:
    """Splits of a model and orders for them.

    Args:
        plan: the plan.
        model: the whole model.
    """

    def __init__(self, plan: ParallelPlan, model: Any) -> None:
        self._plan, self._model = plan, model
        outline = models().outline(model)
        pp, dtype = plan.mesh.pp, plan.fsdp.param_dtype or plan.run.dtype
        # Bytes that training takes for each byte of weights, and a saved byte in the dtype of the forward.
        self._static = training_bytes(plan, outline) * pp / (outline.elements * BYTES[plan.run.dtype])
        self._saved = BYTES[dtype] / BYTES[plan.run.dtype]
        self._splits: dict[int, Split] = {}

    def split(self, stages: int) -> Split:
        """Split the model into so many stages."""
        if stages not in self._splits:
            self._splits[stages] = split_stages(self._plan, self._model, stages)
        return self._splits[stages]

    def _cost(self, stages: int) -> Costs:
        cost = self.split(stages).cost()
        scaled = {
            name: tuple(each * factor for each in cost.of(name, stages))
            for name, factor in (("static", self._static), ("saved", self._saved), ("held", self._saved))
        }
        return dataclasses.replace(cost, **scaled)

    def choice(self, name: str, shape: Shape, stages: int, write: Callable[[Pipeline], Order]) -> Choice:
        """Write an order for stages in a shape."""
        placement = _placement(self._plan, shape, stages)
        pipeline = Pipeline(placement, micro_batches(self._plan), cost=self._cost(stages))
        return Choice(name, self.split(stages), pipeline, write(pipeline))

    def fastest(self, memory: float) -> Choice:
        """Look for the fastest order of all placements within so many bytes a rank.

        Raises:
            ValueError: nothing fits.
        """
        pp, listed = self._plan.mesh.pp, self._plan.pipeline.split
        best, problem = None, None
        blocks = sum(len(stage.blocks) for stage in self.split(stage_count(self._plan)).stages)
        for stages in [len(listed)] if isinstance(listed, tuple) else [pp, 2 * pp, 4 * pp]:
            if stages > blocks:
                continue
            moves = max(20, min(300, 40_000 // (3 * stages * micro_batches(self._plan))))
            look = functools.partial(synthesize, memory=memory, moves=moves)
            for shape in _shapes(stages // pp):
                try:
                    candidate = self.choice("auto", shape, stages, look)
                except ValueError as error:
                    problem = error
                    continue
                if check_shared(self._plan, candidate.split, candidate.pipeline.placement):
                    continue
                if best is None or candidate.trace.makespan < best.trace.makespan:
                    best = candidate
        if best is None:
            assert problem is not None, "stages in a line, or in a loop, are always there"
            raise problem
        return best


def split_stages(plan: ParallelPlan, model: Any, stages: int) -> Split:
    """Split the model as the plan says into so many stages.

    Raises:
        PlanError: it can't be.
    """
    try:
        return _split(plan, model, stages, plan.pipeline.split)
    except ValueError as error:
        raise PlanError([_problem(plan, model, stages, error)]) from error


def _split(plan: ParallelPlan, model: Any, stages: int, split: Any) -> Split:
    rows = max(1, samples(plan) // micro_batches(plan))
    example = models().example(rows, plan.data.sequence_length)
    return split_model(models().base(model), stages, split=split, example=example)


def _problem(plan: ParallelPlan, model: Any, stages: int, error: ValueError) -> Diagnostic:
    """Say in the plan's terms why a split was refused."""
    section, pp = plan.pipeline, plan.mesh.pp
    try:
        blocks = len(_split(plan, model, 1, "even").stages[0].blocks)
    except ValueError:
        blocks = None
    if blocks is not None and stages > blocks:
        each = stages // pp
        message = f"{stages} stages, {each} on each of {pp} ranks, of the model's {blocks} blocks"
        most = f"make mesh.pp at most {blocks // each}" if blocks >= 2 * each else "leave pp out"
        return Diagnostic("mesh.pp", message, f"{most}, take fewer stages a rank, or more blocks")
    if blocks is not None and isinstance(section.split, tuple) and sum(section.split) != blocks:
        listed = " + ".join(map(str, section.split))
        message = f"{listed} = {sum(section.split)} blocks, but the model has {blocks}"
        return Diagnostic("pipeline.split", message, f"list {len(section.split)} numbers that sum to {blocks}")
    message = error.problem if isinstance(error, SplitError) else str(error)
    return Diagnostic(
        "mesh.pp", message.rstrip("."), "leave pp out, or write the stages yourself, for hp_pipeline's schedules"
    )


def _shapes(stages_a_rank: int) -> tuple[Shape, ...]:
    return tuple(
        shape
        for shape, own in _STAGES_A_RANK.items()
        if (stages_a_rank > 1 if shape == "loop" else own == stages_a_rank)
    )


def samples(plan: ParallelPlan) -> int:
    """Return the samples of a rank's part of the batch."""
    return plan.data.batch_size // plan.mesh.data_parallel


def micro_batches(plan: ParallelPlan) -> int:
    """Return the number of micro-batches: the plan's, or one for each sample of a rank's part of the batch."""
    return plan.pipeline.micro_batches or max(1, samples(plan))


def stage_count(plan: ParallelPlan) -> int:
    """Return the number of stages; for `schedule = "auto"` the least that it may choose."""
    if plan.pipeline.schedule == "auto":
        return len(plan.pipeline.split) if isinstance(plan.pipeline.split, tuple) else plan.mesh.pp
    shape, _ = ORDERS[plan.pipeline.schedule]
    return plan.mesh.pp * (plan.pipeline.stages_per_rank or _STAGES_A_RANK[shape])


def check_pipeline(plan: ParallelPlan) -> list[Diagnostic]:
    """Check the numbers of [pipeline], and that nothing in the plan is what stages can't have."""
    section, pp = plan.pipeline, plan.mesh.pp
    if pp == 1:
        options = [item.name for item in fields(section) if getattr(section, item.name) != item.default]
        mesh = plan.mesh.described
        message = f"{', '.join(options)} would have no effect: the mesh {mesh} has no pp axis"
        fix = "leave [pipeline] out, or make mesh.pp at least 2"
        return [Diagnostic("pipeline", message, fix)] if options else []
    if get_platform().name != "torch":
        return []  # `check_mesh` refuses the axis.
    diagnostics = [*_check_stages(plan), *_check_micro_batches(plan)]
    if plan.memory.budget is not None:
        message = f"got a budget with mesh.pp = {pp}, which this version does not support"
        fix = "leave [memory] out; a schedule such as 'v-half' or 'v-min' saves memory (hyper-parallel schedule)"
        diagnostics.append(Diagnostic("memory.budget", message, fix))
    return diagnostics


def _check_stages(plan: ParallelPlan) -> list[Diagnostic]:
    section, pp = plan.pipeline, plan.mesh.pp
    if section.schedule != "auto":
        shape, _ = ORDERS[section.schedule]
        own, got = _STAGES_A_RANK[shape], section.stages_per_rank
        if got is not None and shape != "loop" and got != own:
            message = f"got {got}, but '{section.schedule}' has {own} stage{'s' if own > 1 else ''} a rank"
            fix = "leave it out, or write schedule = 'interleaved' or 'looped-bfs'"
            return [Diagnostic("pipeline.stages_per_rank", message, fix)]
    elif section.stages_per_rank is not None:
        message = f"got {section.stages_per_rank}, but 'auto' chooses it"
        fix = "leave it out, or write schedule = 'interleaved' or 'looped-bfs'"
        return [Diagnostic("pipeline.stages_per_rank", message, fix)]
    if not isinstance(section.split, tuple):
        return []
    listed = len(section.split)
    if section.schedule == "auto":
        if listed % pp:
            message = f"got {listed} stages, which pp = {pp} ranks do not divide"
            return [Diagnostic("pipeline.split", message, f"list {pp} or {2 * pp} numbers of blocks")]
    elif listed != stage_count(plan):
        message = (
            f"got {listed} stages, but '{section.schedule}' on pp = {pp} ranks has {stage_count(plan)}:"
            f" {stage_count(plan) // pp} a rank"
        )
        return [Diagnostic("pipeline.split", message, f"list {stage_count(plan)} numbers of blocks")]
    return []


def _check_micro_batches(plan: ParallelPlan) -> list[Diagnostic]:
    count, got = samples(plan), plan.pipeline.micro_batches
    if got is None or plan.data.batch_size % plan.mesh.data_parallel or count % got == 0:
        return []
    parts = plan.mesh.data_parallel
    share = f"{plan.data.batch_size} samples" + (f" over {parts} parts = {count} a rank" if parts > 1 else "")
    message = f"{share} do not divide into {got} micro-batches"
    divisors = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
    fix = f"make it one of {divisors}, or data.batch_size a multiple of {got * parts}"
    return [Diagnostic("pipeline.micro_batches", message, fix)]


def check_split(plan: ParallelPlan, model: Any) -> list[Diagnostic]:
    """Check that the model can be split into the plan's stages.

    Args:
        plan: the plan; nothing is reported where `check_pipeline` reports its number of stages.
        model: the whole model, on any device.
    """
    if plan.mesh.pp == 1 or get_platform().name != "torch" or _check_stages(plan):
        return []
    try:
        split = split_stages(plan, model, stage_count(plan))
    except PlanError as error:
        return list(error.diagnostics)
    found = _check_groups(plan, split, model)
    if plan.pipeline.schedule == "auto" or found:
        return found
    shape, _ = ORDERS[plan.pipeline.schedule]
    return check_shared(plan, split, _placement(plan, shape, stage_count(plan)))


def check_shared(plan: ParallelPlan, split: Split, placement: Sequence[int]) -> list[Diagnostic]:
    """Check that no weight that is sharded over data parallel ranks is in two stages of one rank: two groups."""
    if not in_groups(plan):
        return []
    for info in split.shared:
        ranks = [placement[stage] for stage in info.shared_stage]
        if len(set(ranks)) < len(ranks):
            both = " and ".join(map(str, info.shared_stage))
            message = (
                f"stages {both} share {info.parameter}, and are on one rank, whose groups of dp_shard can't share it"
            )
            fix = "take a schedule without stages there and back, such as 'interleaved', or tie_word_embeddings = false"
            return [Diagnostic("pipeline.schedule", message, fix)]
    return []


def _check_groups(plan: ParallelPlan, split: Split, model: Any) -> list[Diagnostic]:
    """Check that the module of a weight that stages share, which is a sharded group of its own, shares no other."""
    if not in_groups(plan):
        return []
    tied = models().outline(model).tied
    for info in (each for index in range(len(split.stages)) for each in split.shared_in(index)):
        module = info.parameter.rpartition(".")[0]
        for names in tied:
            inside = [name for name in names if name.startswith(f"{module}.")]
            if inside and info.parameter not in names and len(inside) < len(names):
                other = next(name for name in names if name not in inside)
                message = (
                    f"stages share {info.parameter}, so {module} is a group of dp_shard of its own, but {inside[0]} is"
                    f" {other} as well, of another group"
                )
                fix = "leave pp or dp_shard out, or tie_word_embeddings = false"
                return [Diagnostic("mesh.pp", message, fix)]
    return []


def _placement(plan: ParallelPlan, shape: Shape, stages: int) -> tuple[int, ...]:
    return placed(shape, plan.mesh.pp, stages // plan.mesh.pp if shape == "loop" else None)
