"""Everything that is wrong with a plan, found without starting a rank."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from hp_plan.checks import plan_faults, platform_faults
from hp_plan.findings import Finding, PlanError
from hp_plan.framework import framework
from hp_plan.model_checks import model_faults
from hp_plan.plan import ParallelPlan, read_plan, read_toml


def lint(
    plan: ParallelPlan | Mapping[str, Any] | str | PathLike[str],
    world_size: int | None = None,
    *,
    model: Any = None,
) -> tuple[Finding, ...]:
    """Reads a plan against its model and returns every fault, worst-read first; empty when there is none.

    The model is built without its weights: no memory, no ranks.

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
    found += platform_faults(plan)
    if found and found[-1].key == "run.platform":
        return tuple(found)  # Its model is of another framework.
    found += plan_faults(plan, world_size)
    if model is None:
        build = framework("build")
        section = build.model_section_faults(plan)
        # An unknown setting of the configuration doesn't keep the model from being built without it.
        unknown = {fault.key.removeprefix("model.overrides.") for fault in section if "overrides" in fault.key}
        found += section
        if len(unknown) < len(section):
            return tuple(found)
        try:
            model = build.build_empty(_without(plan, unknown))
        except PlanError as error:
            return (*found, *error.findings)
    return (*found, *model_faults(plan, framework("models").outline(model)))


def _without(plan: ParallelPlan, overrides: set[str]) -> ParallelPlan:
    tables = plan.to_dict()
    kept = {name: value for name, value in plan.model.overrides.items() if name not in overrides}
    return ParallelPlan.from_dict({**tables, "model": {**tables["model"], "overrides": kept}})
