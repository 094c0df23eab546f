"""Everything that is wrong with a plan, found without starting a rank."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from hp_plan.checks import model_faults, plan_faults, platform_faults
from hp_plan.diagnostics import Finding, PlanError
from hp_plan.outline import ModelOutline
from hp_plan.plan import ParallelPlan, read_plan, read_toml
from hp_plan.port import build, models
from hp_platform import get_platform

UNREAD = (
    "[model] function is code and was not run, so nothing was checked against the model; {0} imports and calls it, "
    "where you trust the plan"
)


@dataclass(frozen=True)
class Report:
    """A plan that was read against its model.

    Attributes:
        plan: as far as it could be read.
        findings: every fault.
        model: what it was read against; None where the model could not be built, or was not to be.
        unread: the model is a function's, and was not built because that would have run the plan's code.
    """

    plan: ParallelPlan
    findings: tuple[Finding, ...]
    model: ModelOutline | None = None
    unread: bool = False


def lint(
    plan: ParallelPlan | Mapping[str, Any] | str | PathLike[str],
    world_size: int | None = None,
    *,
    model: Any = None,
    run_model_code: bool = False,
) -> tuple[Finding, ...]:
    """Reads a plan against its model and returns every fault, worst-read first; empty when there is none.

    The model is built without its weights: no memory, no ranks. A plan with `[model] function` is code, which is
    neither imported nor called unless `run_model_code` says so; then nothing is checked against the model, and a
    warning says that.

    Args:
        plan: a plan, or what one is read from: nested dictionaries or the path of a TOML file. Only these can show
            unknown keys, which are reported with all the rest.
        world_size: how many ranks there will be; None leaves the mesh's size unchecked.
        model: the model to read against in place of the one that the plan declares.
        run_model_code: import and call `[model] function`.

    Raises:
        ImportError: the plan needs transformers and it isn't installed.
        OSError: the file can't be read.
    """
    found: list[Finding] = []
    if not isinstance(plan, ParallelPlan):
        try:
            tables = plan if isinstance(plan, Mapping) else read_toml(plan)
        except PlanError as error:
            return error.findings
        plan, found = read_plan(tables)
    report = examine(plan, found, world_size, model=model, run_model_code=run_model_code)
    if report.unread:
        warnings.warn(UNREAD.format("lint(plan, run_model_code=True)"), stacklevel=2)
    return report.findings


def examine(
    plan: ParallelPlan,
    found: list[Finding],
    world_size: int | None = None,
    *,
    model: Any = None,
    run_model_code: bool = False,
) -> Report:
    """Reads a plan as `lint` does, and keeps what else was learnt.

    Args:
        plan: the plan.
        found: the faults of reading it.
        world_size: as `lint` takes it.
        model: as `lint` takes it.
        run_model_code: as `lint` takes it.
    """
    found = [*found, *platform_faults(plan)]
    if found and found[-1].key == "run.platform":
        return Report(plan, tuple(found))  # Its model is of another framework.
    found += plan_faults(plan, world_size)
    if model is None:
        builder = build()
        section = builder.model_section_faults(plan, run_code=run_model_code)
        # An unknown setting of the configuration doesn't keep the model from being built without it.
        unknown = {fault.key.removeprefix("model.overrides.") for fault in section if "overrides" in fault.key}
        found += section
        if len(unknown) < len(section):
            return Report(plan, tuple(found))
        if plan.model.function is not None and not run_model_code:
            return Report(plan, tuple(found), unread=True)
        try:
            model = builder.build_empty(_without(plan, unknown))
        except PlanError as error:
            return Report(plan, (*found, *error.findings))
    outline = models().outline(model)
    return Report(plan, (*found, *model_faults(plan, outline)), outline)


def _without(plan: ParallelPlan, overrides: set[str]) -> ParallelPlan:
    tables = plan.to_dict()
    kept = {name: value for name, value in plan.model.overrides.items() if name not in overrides}
    return ParallelPlan.from_dict({**tables, "model": {**tables["model"], "overrides": kept}})


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def least_memory(plan: ParallelPlan, model: ModelOutline) -> int:
    """Bytes that a rank needs for weights, gradients and the optimizer's states alone; activations come on top.

    The larger of the two moments that no plan avoids: every rank builds the whole model before it is cut, and a step
    needs a rank's part of the weights, of their gradients and of the optimizer's states.

    Args:
        plan: says the dtype, the mesh and the optimizer.
        model: how many numbers its parameters have.
    """
    if plan.optimizer.name == "adamw":
        states = 2
    else:
        states = 1 if plan.optimizer.momentum else 0
    cut = (model.elements + model.trained * (1 + states)) // (plan.mesh.world_size // plan.mesh.dp_replicate)
    return max(model.elements, cut) * _BYTES[plan.run.dtype]


def memory_shortage(plan: ParallelPlan, model: ModelOutline, ranks: int) -> str | None:
    """A sentence with the numbers where `ranks` of this machine's ranks can't hold the plan; None where they may.

    Args:
        plan: the plan.
        model: its model.
        ranks: how many ranks of the plan run on this machine. They share its memory on CPU; each has a device else.
    """
    devices = get_platform().devices
    have = devices.total_memory()
    if have is None:
        return None
    rank, shared = least_memory(plan, model), devices.kind == "cpu"
    if (rank * ranks if shared else rank) <= have:
        return None
    device = f"this machine has {_size(have)} for {ranks}" if shared else f"its {devices.kind} device has {_size(have)}"
    needs = f"at least {_size(rank)} of memory for weights, gradients and {plan.optimizer.name}'s states"
    return f"{model.elements:,} parameters in {plan.run.dtype} take a rank {needs}, and {device}"


def _size(number: int) -> str:
    """Bytes as people read them.

    >>> _size(131_072_000_000)
    '131.1 GB'
    """
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
