"""Building what a plan declares: the model, its optimizer, the optimizer's schedule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hp_optim import AdamW, AdamW8bit, ChainedOptimizer
from hp_plan.features.optimizers import grouped, muon_and_adamw, optimized, scheduled_together, swapped
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
from hp_plan.torch.library import folders, pretrained
from hp_plan.torch.library.adapters import add_adapter, freeze, without_adapter
from hp_plan.torch.training.objectives import check_objective_sources

# Keys of [model], one of which says what the model is.
_SOURCES = ("config", "path", "function")


def build_model(
    plan: ParallelPlan, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the whole model of `plan.model`, the same on every rank: `build_parallel_model` takes less memory.

    Args:
        plan: the plan.
        device: where; `"meta"` for shapes alone. None is the default device.
        dtype: of the weights; None is `plan.run.dtype`.

    Raises:
        PlanError: the model can't be built from what the plan says.
        ImportError: the plan names a configuration class and transformers isn't installed.
    """
    chosen: torch.dtype = getattr(torch, plan.run.dtype) if dtype is None else dtype
    diagnostics = check_model_section(plan)
    if diagnostics:
        raise PlanError(diagnostics)
    section = plan.model
    on = torch.device(device) if device is not None else contextlib.nullcontext()
    with on, _default_dtype(chosen), _drawing(plan.run.seed):
        try:
            if section.function is not None:
                model = model_function(section.function, section.folder)(**section.overrides)
            elif section.path is not None:
                on_meta = device is not None and torch.device(device).type == "meta"
                model = folders.build(section, dtype=chosen, empty=on_meta)
            else:
                model = pretrained.build(str(section.config), section.overrides, task=section.task, dtype=chosen)
        except PlanError:
            raise
        except Exception as error:  # Whatever the user's own function or transformers' validation raises.
            key = next(name for name in _SOURCES if getattr(section, name) is not None)
            raise failed(key, getattr(section, key), error) from error
    if section.function is not None:
        check_returned(section.function, model, nn.Module)
    if section.weights_file is not None and not any(parameter.is_meta for parameter in model.parameters()):
        _load_weights(model, section.weights_file)
    if section.freeze and plan.adapter.kind is None:
        freeze(model, plan)
    if plan.adapter.kind is not None:
        with _drawing(plan.run.seed):  # peft draws weights too, before those of the plan replace them
            add_adapter(model, plan, chosen)
    return model


@contextlib.contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Draw from a seed on the host and on the default device; afterwards the caller's generators go on as before."""
    device = torch.get_default_device()
    own: dict[str, Any] = {} if device.type in ("cpu", "meta") else {"device_type": device.type}
    with torch.random.fork_rng([device] if own else [], **own):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach devices that are not in use
        if own:
            torch.get_device_module(device).manual_seed(seed)
        yield


def _load_weights(model: nn.Module, path: str) -> None:
    parameters = dict(model.named_parameters())  # Of those that are one tensor, the first.

    def assign(name: str, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            parameters[name].copy_(tensor)

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    load_weights(path, shapes, framework="pt", assign=assign)


def build_empty(plan: ParallelPlan) -> nn.Module:
    """Build the model of `plan.model` without weights: names and shapes only."""
    return build_model(plan, device="meta")


def check_model_section(plan: ParallelPlan, *, run_code: bool = True) -> list[Diagnostic]:
    """Check `[model]` before anything is built: neither or both kinds, unknown names.

    Args:
        plan: the plan.
        run_code: import the module of `[model] function` to look for it there.
    """
    section, objective = plan.model, check_objective_sources(plan, run_code=run_code)
    given = [name for name in _SOURCES if getattr(section, name) is not None]
    if len(given) != 1:
        got = " and ".join(map(repr, given)) if given else "neither 'config' nor 'path' nor 'function'"
        fix = 'give one: config = "Qwen3Config", path = "folder/of/a/model" or function = "package.module:function"'
        return [Diagnostic("model", f"[model] has {got}", fix), *objective]
    weights = [*check_weights(section.weights_file), *objective]
    if section.function is not None:
        return [*check_function(section.function, section.folder, run_code=run_code), *weights]
    if section.path is not None:
        return [*folders.check_folder(section), *weights]
    try:
        config = pretrained.config_class(str(section.config))
        pretrained.model_class(config, section.task)
    except PlanError as error:
        return [*error.diagnostics, *objective]
    return [*pretrained.check_settings(config, section.overrides), *weights]


def check_fit(plan: ParallelPlan, model: nn.Module) -> list[Diagnostic]:
    """Check that the weights that the plan reads are those of the model, by their names and shapes.

    Args:
        plan: the plan.
        model: of the plan, on any device.
    """
    if not plan.model.folder_has_weights:
        return []
    own = model if plan.adapter.kind is None else build_empty(without_adapter(plan))
    return folders.check_fit(own, plan.model)


def build_optimizer(plan: ParallelPlan, parameters: Iterable[Any]) -> Any:
    """Build the optimizer of `plan.optimizer` for those of `parameters` that are trained.

    Args:
        plan: the plan.
        parameters: `model.named_parameters()`, or `model.parameters()` where the plan goes by no names.

    Returns:
        An optimizer of torch's; for `muon` an `hp_optim.ChainedOptimizer`, for `adamw8bit` or states on the host one of
        hp_optim's.

    Raises:
        ValueError: the plan goes by names, and the parameters have none.
    """
    section = plan.optimizer
    trained = optimized(parameters, plan)
    if section.name == "muon":
        return swapped(muon_and_adamw(trained, plan), plan)
    groups = grouped(trained, plan)
    if section.name == "adamw8bit" or (section.name == "adamw" and section.swap_slices):
        kind = AdamW8bit if section.name == "adamw8bit" else AdamW
        return swapped(kind(groups, lr=section.lr, betas=section.betas, eps=section.eps), plan)
    if section.name == "adamw":
        make = functools.partial(torch.optim.AdamW, betas=section.betas, eps=section.eps)
    else:
        make = functools.partial(torch.optim.SGD, momentum=section.momentum)
    # torch takes one parameter at a time where they are not plain tensors, unless told otherwise.
    return make(groups, lr=section.lr, weight_decay=section.weight_decay, foreach=True)


def build_schedule(plan: ParallelPlan, optimizer: Any) -> Any:
    """Build the learning rate schedule of `plan.schedule` over `plan.run.steps`; step it after the optimizer."""
    section, steps = plan.schedule, plan.run.steps
    if isinstance(optimizer, ChainedOptimizer):
        return scheduled_together(build_schedule(plan, each) for each in optimizer.optimizers.values())
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_factor(section, step, steps))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
