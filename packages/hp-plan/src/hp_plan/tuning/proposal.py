"""A plan for a model and a number of ranks, chosen by counted memory.

Note [How a plan is chosen]
Candidates are tried in an order from the least communication to the most, and the first that `lint` finds nothing
wrong with, and that needs no more memory than there is, is taken. First all ranks share one copy by `dp_shard`; experts
are spread over as many of them as the model allows. Then samples are computed one at a time, then blocks are computed
again in backward, then `tp` doubles up to the ranks of a host, then `pp`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_offload.extend import size
from hp_pipeline import split_model
from hp_plan.features.pipelines import held_micro_batches, micro_batches, samples
from hp_plan.linting import examine
from hp_plan.plan import ParallelPlan, read_plan
from hp_plan.port import build, models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import BYTES, training_bytes
from hp_plan.structure.outline import ModelOutline, block_lists, matching, positions
from hp_platform import get_platform

_HOST = 8  # ranks that tensor parallelism may span
_SAMPLES = 8  # of a step, at least
_LENGTH = 2048


@dataclass(frozen=True)
class Estimate:
    """Bytes of a rank, counted from shapes; workspaces of kernels and of communication come on top.

    Attributes:
        trained: its shard of weights, gradients and optimizer states.
        gathered: the largest blocks and the rest of the model, whole, with gradients.
        saved: what backward needs of a micro-batch, and its logits; None where blocks can't be counted.
    """

    trained: int
    gathered: int
    saved: int | None

    @property
    def total(self) -> int:
        """All of them."""
        return self.trained + self.gathered + (self.saved or 0)


@dataclass(frozen=True)
class Proposal:
    """A plan that lints clean, and why.

    Attributes:
        plan: the plan.
        tables: what it says besides defaults.
        estimate: of a rank's memory.
        reasons: dotted key -> why it has its value.
    """

    plan: ParallelPlan
    tables: Mapping[str, Any]
    estimate: Estimate
    reasons: Mapping[str, str]


def propose(tables: Mapping[str, Any], ranks: int, *, memory: int | None = None) -> Proposal:
    """Choose a plan: see Note [How a plan is chosen].

    Args:
        tables: of a plan: `[model]`, and whatever is not to be chosen.
        ranks: their number.
        memory: bytes of a rank; None takes the first plan that lints clean.

    Raises:
        PlanError: the model can't be built, no plan lints clean, or none fits; it names the one that needs least.
    """
    given, diagnostics = read_plan(tables)
    builder = build()
    diagnostics += builder.check_model_section(given, run_code=True)
    if diagnostics:
        raise PlanError(diagnostics)
    model = builder.build_empty(given)
    outline = models().outline(model)
    counts = _Counts(model, outline, given.run.dtype)
    least: tuple[int, ParallelPlan] | None = None
    refusals: list[Diagnostic] = []
    for candidate in _candidates(tables, outline, ranks):
        plan, diagnostics = read_plan(candidate)
        report = examine(plan, diagnostics, ranks, model=model)
        if report.diagnostics:
            refusals = refusals or list(report.diagnostics)
            continue
        estimate = counts.estimate(plan)
        if memory is None or estimate.total <= memory:
            return Proposal(plan, candidate, estimate, _reasons(plan, outline, memory))
        if least is None or estimate.total < least[0]:
            least = estimate.total, plan
    if least is None:
        raise PlanError(refusals)
    mesh = least[1].mesh.described
    message = f"{ranks} ranks of {size(memory or 0)} can't train the model: {mesh} needs least, {size(least[0])} a rank"
    raise PlanError([Diagnostic("mesh", message, "give more ranks or memory, or make data.sequence_length smaller")])


def _candidates(tables: Mapping[str, Any], outline: ModelOutline, ranks: int) -> Iterator[dict[str, Any]]:
    """List tables of plans, the best first."""
    limit = positions(outline.config)
    length = min(limit, _LENGTH) if limit is not None and limit > 1 else _LENGTH
    experts = max((module.experts.count for module in outline.modules.values() if module.experts), default=0)
    blocks = block_lists(outline)
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    for pp in divisors:
        for tp in [each for each in divisors if each <= _HOST and (ranks // pp) % each == 0]:
            shared = ranks // pp
            dp = shared // tp
            rows = max(math.ceil(_SAMPLES / dp), 2 * pp if pp > 1 else 1)
            for saving in ("none", "accumulate", "recompute"):
                if (saving != "none" and pp > 1) or (saving == "accumulate" and rows == 1):
                    continue
                if saving == "recompute" and not blocks:
                    continue
                for ep in [
                    each for each in reversed(divisors) if each == 1 or (each <= experts and shared % each == 0)
                ]:
                    mesh = {"pp": pp, "dp_shard": dp, "tp": tp, "ep": ep}
                    chosen: dict[str, Any] = {
                        "mesh": {axis: number for axis, number in mesh.items() if number > 1},
                        "data": {"sequence_length": length, "batch_size": dp * rows},
                        "run": {"accumulate": rows} if saving != "none" and rows > 1 else {},
                        "memory": {"recompute": list(blocks)} if saving == "recompute" else {},
                    }
                    if dp > 1 and get_platform().devices.kind != "cpu":
                        chosen["fsdp"] = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
                    yield _merged(chosen, tables)


def _merged(chosen: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with what was given in place of what was chosen."""
    result = {key: table for key, table in given.items() if key not in chosen}
    for key, table in chosen.items():
        merged = {**table, **given.get(key, {})}
        if merged:
            result[key] = merged
    return result


class _Counts:
    """What the memory of a model's plans is counted from.

    Args:
        model: on meta.
        outline: of it.
        dtype: of its weights.
    """

    def __init__(self, model: Any, outline: ModelOutline, dtype: str) -> None:
        self._model, self._outline, self._dtype = model, outline, dtype
        names = [name for pattern in block_lists(outline) for name in matching(pattern, outline.names)]
        self.blocks = len(names)
        sizes = [self._elements(name) for name in names]
        self._largest, self._rest = max(sizes, default=0), outline.elements - sum(sizes)
        self._saved: dict[int, tuple[float, float] | None] = {}

    def _elements(self, block: str) -> int:
        inside = (each for name, each in self._outline.modules.items() if name == block or name.startswith(f"{block}."))
        return sum(math.prod(shape) for module in inside for shape in module.shapes.values())

    def _sample(self, length: int) -> tuple[float, float] | None:
        """Return bytes that backward needs of a sample, in the dtype of the weights: hidden states, and the rest."""
        if length not in self._saved:
            self._saved[length] = self._traced(length) or self._counted(length)
        return self._saved[length]

    def _traced(self, length: int) -> tuple[float, float] | None:
        width = self._width()
        return models().saved_bytes(models().base(self._model), length, width) if width else None

    def _counted(self, length: int) -> tuple[float, float] | None:
        """Count by shapes alone: see `split_model`; the input and the output of each norm are hidden states."""
        try:
            saved = split_model(models().base(self._model), 1, example=models().example(1, length)).stages[0].saved
        except (ValueError, NotImplementedError):
            return None
        norms = [each for each in self._outline.modules.values() if each.shapes and _is_vector(each.shapes)]
        entries = sum(math.prod(shape) for each in norms for shape in each.shapes.values())
        hidden = min(saved, 2.0 * length * entries * BYTES[self._dtype])
        return hidden, saved - hidden

    def _width(self) -> int:
        return getattr(self._outline.config, "hidden_size", 0) or 0

    def estimate(self, plan: ParallelPlan) -> Estimate:
        """Count the bytes of a rank."""
        mesh, own = plan.mesh, BYTES[plan.fsdp.param_dtype or plan.run.dtype]
        sharing = max(mesh.tp, mesh.ep)
        # A block is there while it is computed, the next one is on its way, and gradients of one leave.
        gathered = (3 * self._largest // sharing + 2 * self._rest // mesh.tp) * own if plan.mesh.shard_axes else 0
        sample = self._sample(plan.data.sequence_length)
        if sample is None:
            return Estimate(training_bytes(plan, self._outline), gathered, None)
        parts = micro_batches(plan) if mesh.pp > 1 else plan.run.accumulate
        rows = max(1, samples(plan) // parts)
        tokens = rows * plan.data.sequence_length / mesh.cp
        # Ranks of `tp` share heads and features. Hidden states are whole: norms save them, or matrices do, gathered.
        hidden, rest = sample
        saved = (hidden + rest / mesh.tp) * own / BYTES[self._dtype] * rows / mesh.cp * _in_flight(plan)
        if mesh.cp > 1:
            saved *= _EXCHANGED
        if plan.memory.recompute and self.blocks:
            saved = saved / self.blocks + self.blocks * tokens * self._width() * own
        vocabulary = getattr(self._outline.config, "vocab_size", 0) or 0
        copies = 0 if not _has_loss(plan) else _LOGITS if mesh.tp == 1 else _LOGITS + _GATHERED_LOGITS
        return Estimate(training_bytes(plan, self._outline), gathered, int(saved + copies * 4 * tokens * vocabulary))


_EXCHANGED = 1.15  # queries, keys and values are saved as they are exchanged over ranks, too
_LOGITS = 3  # themselves, their logarithms and their gradient
_GATHERED_LOGITS = 2  # and parts of them, before they are gathered, with gradients


def _in_flight(plan: ParallelPlan) -> float:
    """Return how many micro-batches, each of the whole model, the rank with the most has at a time."""
    if plan.mesh.pp == 1:
        return 1.0
    # A run has one more than `check` counts: what a forward computes beside what it saves, or, where backwards for the
    # weights wait, the gradients of outputs that they need.
    return (max(held_micro_batches(plan)) + 1) / plan.mesh.pp


def _has_loss(plan: ParallelPlan) -> bool:
    """Tell whether the rank with the most micro-batches has the last stage: the last rank of `1f1b` has the fewest."""
    if plan.mesh.pp == 1:
        return True
    held = held_micro_batches(plan)
    return held[-1] == max(held)


def _is_vector(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return all(len(shape) < 2 for shape in shapes.values())


def _reasons(plan: ParallelPlan, outline: ModelOutline, memory: int | None) -> dict[str, str]:
    """Say for each chosen key why it has its value."""
    parts = plan.mesh.data_parallel
    without = "lint refuses the plan" if memory is None else f"a rank needs more than {size(memory)}"
    length = positions(outline.config)
    return {
        "mesh.pp": f"stages; without them {without}",
        "mesh.dp_shard": "ranks that share one copy of weights, gradients and optimizer states",
        "mesh.tp": f"ranks that share each matrix, at most the {_HOST} of a host; with less {without}",
        "mesh.ep": "ranks that share a layer's experts, which are not gathered",
        "run.accumulate": f"one sample at a time; with all of a rank's at once {without}",
        "memory.recompute": f"computed again in backward; without it {without}",
        "fsdp.param_dtype": "computed and gathered in it; weights and states stay float32",
        "fsdp.reduce_dtype": "of gradients, so that their sum over ranks loses nothing",
        "data.sequence_length": f"the model takes up to {length}" if length is not None else "a choice",
        "data.batch_size": f"samples of a step, over {parts} part{'s' if parts > 1 else ''} of the ranks",
    }
