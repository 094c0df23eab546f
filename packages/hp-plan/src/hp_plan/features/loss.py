"""The loss of a step: the part that each micro-batch has in it, and `[objective]`.

Note [A loss over tokens]
The loss of a step is the sum over all labels that count, of all ranks and micro-batches, over their number. A mean of
the micro-batches' means is another one, where documents are packed or labels left out. So each rank divides its sums
by the step's number over that of the ranks with other samples: the mean of their losses, and so of their gradients, is
that of one process. Where a model takes means itself, each has the weight of its labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hp_plan.features.experts import balancing_setting
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic
from hp_plan.sections import AdapterSection, MemorySection, ObjectiveSection
from hp_plan.structure.outline import ModelOutline
from hp_platform import get_platform

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


_PAIRS = ("dpo", "reward")
_LEAVE = "leave [objective] out"


def reference_plan(plan: ParallelPlan) -> ParallelPlan | None:
    """Return the plan of the second model that an objective compares with; None where there is none.

    Args:
        plan: the plan of the trained model.
    """
    section = plan.objective
    without = section.kind == "dpo" and section.reference is None and plan.adapter.kind is not None
    if section.kind not in ("dpo", "distill") or without:
        return None
    model = dataclasses.replace(plan.model, freeze=())
    if section.reference is not None:
        model = dataclasses.replace(
            model, path=section.reference, config=None, function=None, weights=None, overrides={}
        )
    return dataclasses.replace(
        plan, model=model, adapter=AdapterSection(), memory=MemorySection(), objective=ObjectiveSection()
    )


def has_copy(plan: ParallelPlan) -> bool:
    """Return True if the objective compares with a second copy of the model."""
    return plan.objective.reference is None and reference_plan(plan) is not None


def check_objective(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the plan can be trained with its objective, by its numbers and names alone."""
    section, pairs = plan.objective, plan.data.format == "preference"
    if not section.is_own:
        if not pairs:
            return []
        message = "got 'preference', but the objective 'causal-lm' does not compare answers"
        fix = "write kind = 'dpo' or 'reward' in [objective]"
        return [Diagnostic("data.format", message, fix)]
    diagnostics = []
    key = "objective.kind" if section.function is None else "objective.function"
    named = repr(section.kind if section.function is None else section.function)
    if section.function is not None and section.kind != "causal-lm":
        diagnostics.append(Diagnostic(key, f"got a function beside kind = {section.kind!r}", "give one of the two"))
    if get_platform().name != "torch":
        message = f"got {named}, which this version does not support on MindSpore"
        diagnostics.append(Diagnostic(key, message, f"{_LEAVE}, or train on PyTorch"))
    if plan.mesh.pp > 1:
        message = f"{named} takes a whole model's logits, which the last stage alone has with mesh.pp = {plan.mesh.pp}"
        diagnostics.append(Diagnostic(key, message, "make mesh.pp 1; the other axes go with it"))
    if section.kind in _PAIRS and not pairs:
        message = f"{named} compares two answers, but data.format is {plan.data.format!r}"
        diagnostics.append(Diagnostic(key, message, "write format = 'preference' in [data]"))
    if section.kind == "distill":
        if pairs:
            message = "got 'preference', but 'distill' does not compare answers"
            diagnostics.append(Diagnostic("data.format", message, "write format = 'messages', or another"))
        if section.reference is None:
            fix = "give the folder of a model with the same tokens"
            diagnostics.append(Diagnostic("objective.reference", "there is no teacher", fix))
    if pairs and plan.data.packing:
        message = "got true, but the two answers of a pair are rows of their own"
        diagnostics.append(Diagnostic("data.packing", message, "leave it out"))
    if section.loss != "sigmoid" and section.label_smoothing:
        message = f"got {section.label_smoothing}, which loss = {section.loss!r} does not use"
        diagnostics.append(Diagnostic("objective.label_smoothing", message, "leave it out"))
    return diagnostics


def check_scores(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check that a model gives what the objective takes: scores, or predictions of tokens."""
    section, config = plan.objective, model.config
    if section.kind == "causal-lm" and section.function is None:
        return []
    diagnostics = []
    if (setting := balancing_setting(config)) is not None:
        message = f"{setting} adds a load balancing loss to the model's own, which is not the objective's"
        fix = f"write {setting} = false in [model.overrides]"
        diagnostics.append(Diagnostic("objective", message, fix))
    scores = model.type_name.endswith("ForSequenceClassification")
    if section.kind == "reward":
        if not scores or getattr(config, "num_labels", None) != 1 or "score" not in model.modules:
            message = f"{model.type_name} does not score a text by one number"
            fix = "write task = 'sequence-classification' in [model], and num_labels = 1 in [model.overrides]"
            diagnostics.append(Diagnostic("model.task", message, fix))
        elif getattr(config, "pad_token_id", None) is None:
            message = "the model has no token for padding, without which transformers takes one text at a time"
            diagnostics.append(Diagnostic("model.overrides", message, "write pad_token_id = 0 in [model.overrides]"))
    elif section.function is None and scores:
        message = f"{section.kind!r} takes predictions of tokens, and {model.type_name} has none"
        diagnostics.append(Diagnostic("objective.kind", message, "take a causal language model"))
    return diagnostics
