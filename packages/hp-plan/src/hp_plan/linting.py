"""Diagnostics of a plan, found without starting a rank, and the memory it needs at least."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from hp_plan.checks.checks import check_model, check_plan, check_platform
from hp_plan.features.communication import check_communication, with_order
from hp_plan.features.pipelines import check_split
from hp_plan.plan import ParallelPlan, read_plan, read_toml
from hp_plan.port import build, models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import BYTES, host_bytes, training_bytes
from hp_plan.structure.outline import ModelOutline
from hp_platform import get_platform

UNREAD = (
    "[model] function is code and was not run, so nothing was checked against the model; if you trust the plan, {0} "
    "imports and calls it"
)


@dataclass(frozen=True)
class Report:
    """A plan that was read against its model.

    Attributes:
        plan: as far as it could be read.
        diagnostics: all of them.
        model: the outline it was checked against; None if the model could not be built, or was not to be.
        unread: the model comes from a function, which is code and was not run.
    """

    plan: ParallelPlan
    diagnostics: tuple[Diagnostic, ...]
    model: ModelOutline | None = None
    unread: bool = False

    @property
    def config(self) -> Any:
        """Configuration of the model; None if it has none, or was not built."""
        return None if self.model is None else self.model.config


def lint(
    plan: ParallelPlan | Mapping[str, Any] | str | PathLike[str],
    world_size: int | None = None,
    *,
    model: Any = None,
    run_model_code: bool = False,
) -> tuple[Diagnostic, ...]:
    """Check a plan against its model and return all diagnostics; empty if there is nothing wrong.

    The model is built without its weights: no memory, no ranks. A plan with `[model] function` is code, which is
    neither imported nor called unless `run_model_code` says so; then nothing is checked against the model, and a
    warning says that.

    Args:
        plan: a plan, nested dictionaries or the path of a TOML file. Only the latter two can have unknown keys, which
            are reported with the rest.
        world_size: number of ranks; None leaves the mesh's size unchecked.
        model: check against this model instead of the one that the plan declares.
        run_model_code: import and call `[model] function`.

    Raises:
        ImportError: the plan needs transformers and it isn't installed.
        OSError: the file can't be read.
    """
    diagnostics: list[Diagnostic] = []
    if not isinstance(plan, ParallelPlan):
        try:
            tables = plan if isinstance(plan, Mapping) else read_toml(plan)
        except PlanError as error:
            return error.diagnostics
        plan, diagnostics = read_plan(tables)
    report = examine(plan, diagnostics, world_size, model=model, run_model_code=run_model_code)
    if report.unread:
        warnings.warn(UNREAD.format("lint(plan, run_model_code=True)"), stacklevel=2)
    return report.diagnostics


def examine(
    plan: ParallelPlan,
    diagnostics: list[Diagnostic],
    world_size: int | None = None,
    *,
    model: Any = None,
    run_model_code: bool = False,
) -> Report:
    """Check a plan as `lint` does, and return the model's outline as well.

    Args:
        plan: the plan.
        diagnostics: those of reading it.
        world_size: as `lint` takes it.
        model: as `lint` takes it.
        run_model_code: as `lint` takes it.
    """
    diagnostics = [*diagnostics, *check_platform(plan)]
    if diagnostics and diagnostics[-1].key == "run.platform":
        return Report(plan, tuple(diagnostics))  # Its model is of another framework.
    diagnostics += check_plan(plan, world_size)
    if model is None:
        builder = build()
        section = builder.check_model_section(plan, run_code=run_model_code)
        # An unknown setting of the configuration doesn't keep the model from being built without it.
        unknown = {each.key.removeprefix("model.overrides.") for each in section if "overrides" in each.key}
        diagnostics += section
        if len(unknown) < len(section):
            return Report(plan, tuple(diagnostics))
        if plan.model.function is not None and not run_model_code:
            return Report(plan, tuple(diagnostics), unread=True)
        try:
            model = builder.build_empty(_without(plan, unknown))
        except PlanError as error:
            return Report(plan, (*diagnostics, *error.diagnostics))
        diagnostics += builder.check_fit(plan, model)
    try:
        outline = models().outline(model)
    except PlanError as error:  # what the model declares of itself is wrong
        return Report(plan, (*diagnostics, *error.diagnostics))
    diagnostics += [*check_model(plan, outline), *check_split(plan, model)]
    if plan.mesh.order == "auto" and not diagnostics:
        diagnostics += check_communication(with_order(plan, outline))
    return Report(plan, tuple(diagnostics), outline)


def refuse_by_itself(plan: ParallelPlan, diagnostics: list[Diagnostic], world_size: int | None = None) -> None:
    """Refuse a plan that is wrong whatever its model is, before the framework and the model's code are imported.

    The import takes seconds. `examine` finds what is wrong with the model as well.

    Args:
        plan: the plan.
        diagnostics: those of reading it.
        world_size: as `lint` takes it.

    Raises:
        PlanError: it has all that is wrong with the plan by itself.
    """
    found = [*diagnostics, *check_platform(plan), *check_plan(plan, world_size)]
    if found:
        raise PlanError(found)


def order_axes(plan: ParallelPlan) -> ParallelPlan:
    """Choose the order of a mesh's axes for `[mesh] order = "auto"`: that by which the fewest bytes go between hosts.

    It depends on the plan and the shapes of its model alone, so each rank may call it for itself. Nothing but the
    choice can be trained: rows of data depend on it.

        plan = order_axes(ParallelPlan.from_toml("plan.toml"))

    Args:
        plan: the plan, with `mesh.ranks_per_host`. Its model is built without weights, so its code is run.

    Returns:
        The plan with the order; the same plan where it has another one than "auto".

    Raises:
        PlanError: something is wrong with the plan.
    """
    if plan.mesh.order != "auto":
        return plan
    report = examine(plan, [], run_model_code=True)
    if report.diagnostics or report.model is None:
        raise PlanError(report.diagnostics)
    return with_order(plan, report.model)


def _without(plan: ParallelPlan, overrides: set[str]) -> ParallelPlan:
    tables = plan.to_dict()
    overrides_left = {name: value for name, value in plan.model.overrides.items() if name not in overrides}
    return ParallelPlan.from_dict({**tables, "model": {**tables["model"], "overrides": overrides_left}})


def least_memory(plan: ParallelPlan, model: ModelOutline) -> int:
    """Estimate the bytes that weights, gradients and optimizer states take on a rank; activations come on top.

    It is the larger of two peaks that no plan avoids: every rank builds the full model before it is sharded, and a step
    needs this rank's shard of the weights, gradients and optimizer states.

    Args:
        plan: says the dtype, the mesh and the optimizer.
        model: the number of elements of its parameters.
    """
    on_host = host_bytes(plan, model) if get_platform().devices.kind == "cpu" else 0
    return max(model.elements * BYTES[plan.run.dtype], training_bytes(plan, model) + on_host)


def memory_shortage(plan: ParallelPlan, model: ModelOutline, ranks: int) -> str | None:
    """Describe the shortage if this machine cannot hold `ranks` ranks of the plan; None if it may.

    Args:
        plan: the plan.
        model: its model.
        ranks: number of the plan's ranks on this machine. On CPU they share its memory; else each has a device.
    """
    devices = get_platform().devices
    total = devices.total_memory()
    if total is None:
        return None
    rank, shared = least_memory(plan, model), devices.kind == "cpu"
    if (rank * ranks if shared else rank) <= total:
        return None
    owner = f"this machine, for {ranks} ranks," if shared else f"its {devices.kind} device"
    needs = f"at least {_size(rank)} of memory per rank for weights, gradients and {plan.optimizer.name}'s states"
    return f"{model.elements:,} parameters in {plan.run.dtype} need {needs}, but {owner} has {_size(total)}"


def _size(number: int) -> str:
    """Format bytes for people.

    >>> _size(131_072_000_000)
    '131.1 GB'
    """
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
