"""The parts of a model under a plan, whole or in stages, that are on this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hp_fsdp import clip_grad_norm_, global_grad_norm
from hp_pipeline import MetaStepType, PipelinedModel
from hp_pipeline.extend import compute_parts
from hp_plan.plan import ParallelPlan


def clip_gradients(model: Any, limit: float | None) -> torch.Tensor:
    """Return the norm of all gradients, over stages too, after scaling them down to a limit where there is one.

    Args:
        model: under the plan.
        limit: of the norm; None leaves gradients alone.
    """
    parameters, over = list(model.parameters()), {}
    if isinstance(model, PipelinedModel):
        over = {"group": model.schedule.group, "copies": model.schedule.copies()}
    return global_grad_norm(parameters, **over) if limit is None else clip_grad_norm_(parameters, limit, **over)


class Part:
    """A module on this rank, under the whole model's names: the model itself, or a stage of it.

    Args:
        module: the model or the stage.
        names: of the modules in it that compute here.
        forwards: the micro-batches of a step, in the order in which they run.
    """

    def __init__(self, module: nn.Module, names: set[str], forwards: tuple[int, ...] = (0,)) -> None:
        self.module, self.names, self._forwards, self._begun = module, names, forwards, 0
        self._told: int | None = None

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters, a shared one under each of its names."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the modules that compute here, a shared one under each of its names."""
        named = self.module.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if name.rpartition(".")[0] in self.names}

    def samples(self, rows: slice) -> slice:
        """Return the samples of the micro-batch that runs now, of this rank's samples of the batch."""
        told = self._told  # a whole model may be traced before
        micro = self._forwards[(self._begun - 1) % len(self._forwards)] if told is None else told
        count = (rows.stop - rows.start) // len(self._forwards)
        return slice(rows.start + micro * count, rows.start + (micro + 1) * count)

    def begins(self, micro: int) -> None:
        """Note which micro-batch runs next, of a whole model; a schedule's are counted."""
        self._told = micro

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the forwards of a step, to know which micro-batch runs."""

        def count(*_: Any) -> None:
            self._begun += 1

        self._begun = 0
        handle = self.module.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()


def parts(plan: ParallelPlan, model: Any, single: nn.Module) -> Iterator[Part]:
    """List the modules of a model under a plan that are on this rank.

    Args:
        plan: the plan.
        model: under the plan.
        single: the same model without one; a stand-in for what another stage runs has not its class.
    """
    if not isinstance(model, PipelinedModel):
        names = {name for name, _ in model.named_modules()}
        yield Part(model, names, tuple(range(plan.run.accumulate)))
        return
    kinds = {name: type(module) for name, module in single.named_modules()}
    for index, stage in model.stages.items():
        yield Part(stage, _own_names(stage, kinds), forwards(model, index))


def _own_names(stage: nn.Module, kinds: Mapping[str, type]) -> set[str]:
    """List the modules that a stage runs on its own inputs.

    Beside the blocks each stage runs all that has no parameters, on zeros where what it follows is another stage's.
    """
    modules = dict(stage.named_modules())
    names = {name for name, each in modules.items() if isinstance(each, kinds[name])}
    lists = {name.rpartition(".")[0] for name in modules.keys() - names if name.rpartition(".")[2].isdigit()}
    around = {name[:at] for name in lists for at in (*_dots(name), len(name), 0)}
    return {
        name
        for name in names
        if name.rpartition(".")[0] not in around or next(modules[name].parameters(), None) is not None
    }


def _dots(name: str) -> list[int]:
    return [at for at, letter in enumerate(name) if letter == "."]


def forwards(model: PipelinedModel, stage: int) -> tuple[int, ...]:
    """List the micro-batches of a step in the order in which a stage's forwards take them."""
    own = model.schedule.exec_order[model.schedule.rank]
    steps = [part for step in own for part in compute_parts(step) if part.stage_index == stage]
    return tuple(part.micro_index for part in steps if part.step_type is MetaStepType.FORWARD)  # type: ignore[misc]
