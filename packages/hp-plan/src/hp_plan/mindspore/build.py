"""Building what a plan declares: the model, with the plan applied or without, its optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim
from mindspore.experimental.optim.lr_scheduler import LambdaLR

from hp_dtensor import DeviceMesh, SkipDTensorDispatch, init_empty_weights
from hp_optim import ChainedOptimizer
from hp_plan.application import apply
from hp_plan.features.optimizers import grouped, muon_and_adamw, optimized, scheduled_together
from hp_plan.mindspore.models import named_parameters
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.sections import schedule_factor
from hp_plan.structure.model_source import (
    check_function,
    check_returned,
    check_weights,
    failed,
    load_weights,
    model_function,
)
from hp_platform import get_platform


def build_model(plan: ParallelPlan, *, dtype: Any = None) -> nn.Cell:
    """Build the model of `plan.model`, its weights drawn from `plan.run.seed`: the same on every rank.

    Args:
        plan: the plan.
        dtype: of the weights; None is `plan.run.dtype`.

    Raises:
        PlanError: the model can't be built from what the plan says.
    """
    diagnostics = check_model_section(plan)
    if diagnostics:
        raise PlanError(diagnostics)
    name = str(plan.model.function)
    try:
        with get_platform().random.drawing(plan.run.seed, None):
            model = model_function(name, plan.model.folder)(**plan.model.overrides)
    except PlanError:
        raise
    except Exception as error:  # Whatever the user's own function raises.
        raise failed("function", name, error) from error
    check_returned(name, model, nn.Cell)
    _check_statistics(model)
    chosen = getattr(mindspore, plan.run.dtype) if dtype is None else dtype
    for parameter in model.get_parameters():
        if parameter.dtype != chosen:
            parameter.set_dtype(chosen)
    if plan.model.weights_file is not None and not any(parameter.has_init for parameter in model.get_parameters()):
        _load_weights(model, plan.model.weights_file)
    return model


def _check_statistics(model: nn.Cell) -> None:
    """Refuse BatchNorm: its statistics are Parameters and so sharded, and a forward's writes to them are lost."""
    for name, cell in model.cells_and_names():
        if not {"moving_mean", "running_mean"}.isdisjoint(cell._params):
            message = f"{name} is a {type(cell).__name__}, whose running statistics a sharded step does not keep"
            raise PlanError([Diagnostic("model.function", message, "use a norm without them, such as LayerNorm")])


def _load_weights(model: nn.Cell, path: str) -> None:
    # Of the names of one tensor, the first.
    names = {id(parameter): name for name, parameter in reversed(list(named_parameters(model)))}
    parameters = {names[id(parameter)]: parameter for _, parameter in named_parameters(model)}

    def assign(name: str, array: Any) -> None:
        parameters[name].set_data(mindspore.Tensor(array, parameters[name].dtype))

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    load_weights(path, shapes, framework="np", assign=assign)


def build_empty(plan: ParallelPlan) -> nn.Cell:
    """Build the model of `plan.model` without weights: names and shapes only."""
    with init_empty_weights():
        return build_model(plan)


def check_model_section(plan: ParallelPlan, *, run_code: bool = True) -> list[Diagnostic]:
    """Check `[model]` before anything is built.

    Args:
        plan: the plan.
        run_code: import the module of `[model] function` to look for it there.
    """
    section = plan.model
    if section.config is not None or section.path is not None:
        key = "config" if section.config is not None else "path"
        message = f"{getattr(section, key)} is of transformers, which runs on PyTorch, but this process runs MindSpore"
        fix = 'write function = "module:function", which returns a Cell, or platform = "torch" in [run]'
        return [Diagnostic(f"model.{key}", message, fix)]
    if section.function is None:
        return [Diagnostic("model", "[model] has no 'function'", 'write function = "package.module:function"')]
    return [*check_function(section.function, section.folder, run_code=run_code), *check_weights(section.weights_file)]


def check_fit(plan: ParallelPlan, model: nn.Cell) -> list[Diagnostic]:
    """Check weights against the model: those of a file are, while they are read."""
    return []


def build_optimizer(plan: ParallelPlan, parameters: Iterable[Any]) -> Any:
    """Build the optimizer of `plan.optimizer` for those of `parameters` that are trained.

    Those of `mindspore.experimental` do what torch's of the same names do. `mindspore.mint.optim` has no AdamW on CPU,
    and its Adam and SGD return without having updated anything.

        with SkipDTensorDispatch():
            optimizer(gradients)

    Args:
        plan: the plan.
        parameters: Parameters, whose names are those of the plan's patterns.

    Returns:
        An optimizer of `mindspore.experimental`; for `muon` and with groups an `hp_optim.ChainedOptimizer`, whose
        `step({name: gradient})` does not depend on the order of the groups.
    """
    section = plan.optimizer
    pairs = optimized(((parameter.name, parameter) for parameter in parameters), plan)
    if section.name == "muon":
        return muon_and_adamw(pairs, plan)
    groups, common = grouped(pairs, plan), {"lr": section.lr, "weight_decay": section.weight_decay}
    optimizer: Any
    with SkipDTensorDispatch():  # Its averages are of the local parts.
        if section.name == "adamw":
            optimizer = optim.AdamW(groups, betas=section.betas, eps=section.eps, **common)
        else:
            optimizer = optim.SGD(groups, momentum=section.momentum, **common)
    return ChainedOptimizer(pairs, {section.name: optimizer}) if section.groups else optimizer


def build_schedule(plan: ParallelPlan, optimizer: Any) -> Any:
    """Build the learning rate schedule of `plan.schedule` over `plan.run.steps`; step it after the optimizer."""
    section, steps = plan.schedule, plan.run.steps
    if isinstance(optimizer, ChainedOptimizer):
        return scheduled_together(build_schedule(plan, each) for each in optimizer.optimizers.values())
    return PlanSchedule(optimizer, lambda step: schedule_factor(section, step, steps))


class PlanSchedule(LambdaLR):
    """A schedule that is saved and goes on, with the state of ``torch.optim.lr_scheduler.LambdaLR``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the learning rates, as torch's has them."""
        step = int(self.last_epoch.asnumpy())
        rates = [float(rate.asnumpy()) for rate in self.get_last_lr()]
        base = [float(rate.asnumpy()) for rate in self.base_lrs]
        state = {"base_lrs": base, "last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
        return {**state, "lr_lambdas": [None] * len(base)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the step that was saved.

        Args:
            state_dict: what `state_dict` gave, or torch's.

        Raises:
            ValueError: it is of another number of groups.
        """
        base = state_dict["base_lrs"]
        if len(base) != len(self.base_lrs):
            raise ValueError(f"load: the schedule was saved with {len(base)} groups, expected {len(self.base_lrs)}")
        self.base_lrs = [Tensor(value, mindspore.float32) for value in base]
        ops.assign(self.last_epoch, Tensor(state_dict["last_epoch"], mindspore.float32))
        for rate, value in zip(self._last_lr, self.get_lr(), strict=True):
            ops.assign(rate, value)


def build_parallel_model(plan: ParallelPlan, mesh: DeviceMesh | None = None) -> nn.Cell:
    """Build the model of `plan.model` and apply the plan to it: `apply(build_model(plan), plan, mesh)`."""
    return apply(build_model(plan), plan, mesh)
