"""Verifying a plan: the same steps under it and in one process, compared tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hp_offload.extend import parse_size
from hp_plan.application import apply
from hp_plan.checks.verification import VerifyResult
from hp_plan.features.loss import IGNORED
from hp_plan.plan import ParallelPlan, context_tokens, data_parallel_rows
from hp_plan.port import models
from hp_plan.sections import CompileSection, MemorySection
from hp_plan.structure.memory import BYTES, memory_left, training_bytes
from hp_plan.torch.build import build_model, build_objective, build_optimizer, build_schedule
from hp_plan.torch.compared import Compared, Float64
from hp_plan.torch.library.compat import products_in_float64
from hp_plan.torch.library.low_precision import (
    emulated,
    factor_of_gradients,
    lower_precision_in_parts,
    what_was_multiplied,
)
from hp_plan.torch.models import batch_of, loss_inputs
from hp_plan.torch.sequences.context_guard import unguarded
from hp_plan.torch.training.loss import backward_loss, gives_items
from hp_plan.torch.training.objectives import Objective
from hp_plan.torch.training.parts import clip_gradients
from hp_platform import get_platform


def verify(plan: ParallelPlan, *, steps: int = 2, tolerance: float = 1e-9) -> VerifyResult:
    """Train the plan's model twice in float64, under the plan and in one process, and compare the results.

    Every rank calls it. Each runs the one-process program for itself and compares every module's output on its own
    samples, and after each step the loss, every gradient, every weight and every buffer. Labels are left out at random,
    more of some samples than of others, where the model's loss counts those that are left. Before anything runs under
    the plan, ranks compare their one-process programs: one that reads the rank, or draws from generators that ranks
    seed differently, fails there, as what follows might not end.

    Args:
        plan: the plan; its dtypes are replaced by float64, its text by random tokens.
        steps: optimizer steps.
        tolerance: the largest relative difference that passes.

    Returns:
        The same on every rank.

    Raises:
        PlanError: the plan doesn't fit its model or the number of ranks.
    """
    left_out = ("blocks ran uncompiled, as modules in them are compared",) if plan.compile.blocks else ()
    if plan.precision.formats:
        left_out += (what_was_multiplied(plan.precision),)
    if plan.communication.wire:
        left_out += ("gradients between replicas were sent as they are, without [communication] wire",)
    if plan.mesh.pp > 1 and (plan.memory.recompute or plan.memory.swap):
        left_out += ("stages kept their activations, without [memory] recompute and swap",)
    plan = _in_float64(plan)
    with Float64(lowers=bool(plan.precision.formats)) as mode, products_in_float64(plan.precision):
        device = get_platform().devices.current_device()
        single, parallel = build_model(plan).to(device), apply(build_model(plan).to(device), plan)
        lower_precision_in_parts(plan, single)
        alone = build_objective(plan, lambda other: build_model(other).to(device))
        runs = [_Run(plan, single, alone), _Run(plan, parallel, build_objective(plan))]
        compared = Compared(plan, single, parallel)
        rows, places = _rows(plan), context_tokens(plan)
        vocabulary = getattr(getattr(single, "config", None), "vocab_size", 256)
        alike = True
        leaves_out = _leaves_out(plan, build_model(plan).to(device))
        for step in range(steps):
            batch = _batch(plan, vocabulary, step, leaves_out)
            compared.begin_step()
            mode.trains = True
            with compared.expected_outputs():
                expected = runs[0].whole(batch)
            alike = compared.ranks(expected, tolerance)
            if not alike:
                break
            with compared.outputs(rows, places, batch=len(batch.tokens)), unguarded():
                got = runs[1].share(batch[rows], compared.begins)
            mode.trains = False
            compared.loss(got, expected)
            compared.tensors("gradient", lambda parameter: parameter.grad)
            compared.leave_out_unseen()
            runs[0].update(lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit))
            runs[1].update(clip_gradients)
            compared.tensors("weight", lambda parameter: parameter.detach())
            compared.buffers()
    result = compared.result(tolerance)
    unlike = (
        f"ranks that each run the whole model in one process differ, first in {result.first or 'its loss'!r}: it reads"
        " the rank, or draws at random; nothing was run under the plan in this step"
    )
    return dataclasses.replace(result, notes=(*mode.notes, *left_out, *(() if alike else (unlike,))))


def refusal_under_cp(plan: ParallelPlan) -> str | None:
    """Call the plan's model once, over all ranks as `cp`, and return why it is refused; None if it isn't.

    The call compares parts of a sequence with the whole: Note [Parts and the whole] in
    `hp_plan.torch.sequences.context_guard`.

    Args:
        plan: of `cp` alone, whose model `lint` finds nothing against.
    """
    device = get_platform().devices.current_device()
    model = apply(build_model(plan).to(device), plan)
    generator = torch.Generator().manual_seed(plan.run.seed)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 256)
    tokens = torch.randint(vocabulary, (1, plan.data.sequence_length), generator=generator).to(device)
    try:
        with torch.no_grad():
            model(**loss_inputs(plan, tokens))
    except (NotImplementedError, ValueError) as error:  # of the border or the style, on all ranks alike
        return str(error)
    return None


@dataclass
class _Batch:
    """Samples of a step.

    Attributes:
        tokens: (samples, sequence length).
        labels: as of `backward_loss`.
        positions: as of `backward_loss`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> _Batch:
        own = (None if each is None else each[rows] for each in (self.tokens, self.labels, self.positions))
        return _Batch(*own)  # type: ignore[arg-type]

    def inputs(self, plan: ParallelPlan) -> dict[str, Any]:
        """Return the inputs of a model in one process."""
        given = {"labels": self.labels, "position_ids": self.positions}
        return {**loss_inputs(plan, self.tokens), **{name: each for name, each in given.items() if each is not None}}


class _Run:
    """One of the two programs: a model and its optimizer."""

    def __init__(self, plan: ParallelPlan, model: nn.Module, objective: Objective | None) -> None:
        self._plan, self._model, self._objective = plan, model, objective
        self._optimizer = build_optimizer(plan, model.named_parameters())
        self._schedule = build_schedule(plan, self._optimizer)

    def whole(self, batch: _Batch) -> float:
        """Forward and backward of one process, in one piece."""
        self._optimizer.zero_grad()
        if self._objective is None:
            loss = self._model(**batch.inputs(self._plan))["loss"]
        else:
            own = batch_of(batch.tokens, batch.labels, batch.positions)
            loss = self._objective(self._model, own)[0] / self._objective.items(own["labels"])
        factor = factor_of_gradients(self._plan)
        (loss * factor).backward()
        if factor != 1:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= factor
        return loss.item()

    def share(self, batch: _Batch, begins: Callable[[int], None]) -> float | None:
        """Forward and backward of this rank's samples under the plan; the loss, on ranks that have it."""
        self._optimizer.zero_grad()
        options = {"labels": batch.labels, "positions": batch.positions, "begins": begins}
        options["objective"] = self._objective
        loss = backward_loss(self._plan, self._model, batch.tokens, **options)
        return None if loss is None else loss.item()

    def update(self, clip: Callable[[Any, float], Any]) -> None:
        """Clip the gradients if the plan says so, and take the optimizer's step."""
        if self._plan.run.grad_clip is not None:
            clip(self._model, self._plan.run.grad_clip)
        self._optimizer.step()
        self._schedule.step()


def _batch(plan: ParallelPlan, vocabulary: int, step: int, leaves_out: bool) -> _Batch:
    """Draw the same random samples on every rank, with labels of which some are left out or with none."""
    generator = torch.Generator().manual_seed(plan.run.seed * 1_000_003 + step)
    shape = (plan.data.batch_size * plan.data.width, plan.data.sequence_length)
    device = get_platform().devices.current_device()
    whole = _Batch(torch.randint(vocabulary, shape, generator=generator, dtype=torch.int64).to(device))
    chance = torch.rand(shape, generator=generator)
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    if plan.data.packing:
        starts |= torch.rand(shape, generator=generator) < 0.2
        places = torch.arange(shape[1]).expand(shape)
        whole.positions = (places - torch.where(starts, places, 0).cummax(1).values).to(device)
    if leaves_out:
        # Of the first sample a fourth is left out, of the last a half.
        left_out = starts | (chance < torch.linspace(0.25, 0.5, shape[0])[:, None])
        left_out[:, 1] &= starts[:, 1]
        whole.labels = whole.tokens.masked_fill(left_out.to(device), IGNORED)
    return whole


def _rows(plan: ParallelPlan) -> slice:
    """Return this rank's rows of a batch, of which a sample has several where it is a pair."""
    samples, width = data_parallel_rows(plan), plan.data.width
    return slice(samples.start * width, samples.stop * width)


def _leaves_out(plan: ParallelPlan, model: nn.Module) -> bool:
    """Return True if the model's loss counts labels. It is run once, and may keep a state: it is none of the two."""
    if plan.objective.is_own:
        return True
    tokens = torch.zeros(
        1, plan.data.sequence_length, dtype=torch.int64, device=get_platform().devices.current_device()
    )
    return gives_items(model, {**loss_inputs(plan, tokens), "labels": tokens})


def _in_float64(plan: ParallelPlan) -> ParallelPlan:
    communication = dataclasses.replace(plan.communication, wire={})
    precision = emulated(plan.precision)
    plan = dataclasses.replace(plan, compile=CompileSection(), communication=communication, precision=precision)
    fsdp = dataclasses.replace(plan.fsdp, param_dtype=None, reduce_dtype=None)
    run = dataclasses.replace(plan.run, dtype="float64")
    # Bytes are for the plan's own dtypes: in float64 parameters and activations get as many times more.
    # A stage may put gradients of weights off, where a module that is computed again is seen twice.
    memory = plan.memory if plan.mesh.pp == 1 else MemorySection(homes=plan.memory.homes)
    memory = dataclasses.replace(memory, budget=None, bandwidth=MemorySection().bandwidth)
    if plan.memory.cache is not None:
        cache = parse_size(plan.memory.cache) * BYTES["float64"] // BYTES[plan.run.dtype]
        memory = dataclasses.replace(memory, cache=f"{cache} B")
    double = dataclasses.replace(plan, fsdp=fsdp, run=run, memory=memory)
    if plan.memory.budget is None:
        return double
    outline = models().outline(build_model(plan, device="meta"))
    activations = memory_left(plan, outline) * BYTES["float64"] // BYTES[plan.fsdp.param_dtype or plan.run.dtype]
    memory = dataclasses.replace(memory, budget=plan.memory.budget, bandwidth=plan.memory.bandwidth)
    double = dataclasses.replace(double, memory=memory)
    memory = dataclasses.replace(memory, budget=f"{activations + training_bytes(double, outline)} B")
    return dataclasses.replace(double, memory=memory)
