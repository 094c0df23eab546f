"""The micro-batches of a rank's step, and what each has in the step's loss.

Note [A loss over tokens]
The loss of a step is the sum over all labels that count, of all ranks and micro-batches, over their number. A mean of
the micro-batches' means is another one, where documents are packed or labels left out. So each rank divides its sums
by the step's number over that of the ranks with other samples: the mean of their losses, and so of their gradients, is
that of one process. Where a model takes means itself, each has the weight of its labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_plan.features.experts import balancing_setting
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.structure.outline import ModelOutline

IGNORED = -100
"""The label that losses leave out."""


@dataclass(frozen=True)
class Shares:
    """What this rank's micro-batches have in the step's loss: Note [A loss over tokens].

    Attributes:
        divisor: of a sum over labels.
        weights: of the mean of each micro-batch.
        scale: by which the rank's sum of losses is its part of a mean over ranks.
    """

    divisor: float
    weights: tuple[float, ...]
    scale: float


def cut_rows(plan: ParallelPlan, samples: int) -> list[slice]:
    """Return the samples of each micro-batch.

    Args:
        plan: whose `run.accumulate` is their number.
        samples: of this rank.

    Raises:
        ValueError: they can't be cut into so many.
    """
    parts = plan.run.accumulate
    if samples < parts or samples % parts:
        raise ValueError(f"run.accumulate: {samples} samples of a rank do not divide into {parts} micro-batches")
    each = samples // parts
    return [slice(start, start + each) for start in range(0, samples, each)]


def share_out(plan: ParallelPlan, counts: Sequence[Sequence[int]], rank: int) -> Shares:
    """Weight a rank's micro-batches.

    With `run.deterministic` gradients are added up over ranks, otherwise their mean is taken.

    Args:
        plan: says how many ranks have other samples.
        counts: the labels of each micro-batch of each rank of the world; ranks with the same samples have the same.
        rank: this one.
    """
    parts = plan.mesh.data_parallel
    total = sum(map(sum, counts)) * parts // len(counts)
    ranks = 1 if plan.run.deterministic else parts
    weights = tuple(ranks * count / max(1, total) for count in counts[rank])
    return Shares(max(1, total) / ranks, weights, parts / ranks)


def check_accumulation(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that a rank's part of the batch can be cut into the plan's micro-batches."""
    parts, ranks, batch = plan.run.accumulate, plan.mesh.data_parallel, plan.data.batch_size
    if parts == 1:
        return []
    if plan.mesh.pp > 1:
        message = f"got {parts} with mesh.pp = {plan.mesh.pp}, whose stages run micro-batches already"
        return [Diagnostic("run.accumulate", message, f"write micro_batches = {parts} in [pipeline] instead")]
    if batch % ranks == 0 and batch // ranks % parts:
        share = f"{batch} samples" + (f" over {ranks} ranks = {batch // ranks} each" if ranks > 1 else "")
        divisors = ", ".join(str(number) for number in range(1, batch // ranks + 1) if batch // ranks % number == 0)
        fix = f"make it one of {divisors}, or data.batch_size a multiple of {parts * ranks}"
        return [Diagnostic("run.accumulate", f"{share} do not divide into {parts} micro-batches", fix)]
    return []


def check_balance(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Refuse micro-batches of a model whose load balancing loss is no mean of theirs."""
    setting = balancing_setting(model.config)
    if plan.run.accumulate == 1 or setting is None:
        return []
    message = f"got {plan.run.accumulate}, but {setting} adds a load balancing loss, which is no mean of micro-batches'"
    fix = f"write {setting} = false in [model.overrides], or leave run.accumulate out"
    return [Diagnostic("run.accumulate", message, fix)]
