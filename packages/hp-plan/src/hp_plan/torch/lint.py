"""Everything that is wrong with a plan, found without starting a rank."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from hp_plan.checks import plan_faults
from hp_plan.findings import Finding, PlanError
from hp_plan.plan import ParallelPlan, read_plan, read_toml
from hp_plan.torch.build import build_model, model_section_faults
from hp_plan.torch.checks import model_faults


def lint(
    plan: ParallelPlan | Mapping[str, Any] | str | PathLike[str],
    world_size: int | None = None,
    *,
    model: nn.Module | None = None,
) -> tuple[Finding, ...]:
    """Reads a plan against its model and returns every fault, worst-read first; empty when there is none.

    The model is built on the meta device: no memory, no ranks.

    Args:
        plan: a plan, or what one is read from: nested dictionaries or the path of a TOML file. Only these can show
            unknown keys, which are reported with all the rest.
        world_size: how many ranks there will be; None leaves the mesh's size unchecked.
        model: the model to read against in place of the one that the plan declares.

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
    found += plan_faults(plan, world_size)
    if model is None:
        section = model_section_faults(plan)
        # An unknown setting of the configuration doesn't keep the model from being built without it.
        unknown = {fault.key.removeprefix("model.overrides.") for fault in section if "overrides" in fault.key}
        found += section
        if len(unknown) < len(section):
            return tuple(found)
        try:
            model = build_model(_without(plan, unknown), device="meta")
        except PlanError as error:
            return (*found, *error.findings)
    return (*found, *model_faults(plan, model))


def _without(plan: ParallelPlan, overrides: set[str]) -> ParallelPlan:
    tables = plan.to_dict()
    kept = {name: value for name, value in plan.model.overrides.items() if name not in overrides}
    return ParallelPlan.from_dict({**tables, "model": {**tables["model"], "overrides": kept}})
