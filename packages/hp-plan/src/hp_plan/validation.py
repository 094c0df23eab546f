"""Validation in a plan: where it can run."""

from __future__ import annotations

from hp_plan.diagnostics import Diagnostic
from hp_plan.plan import ParallelPlan


def check_validation(plan: ParallelPlan) -> list[Diagnostic]:
    """Refuse validation of a model in stages, whose schedules have no forward alone."""
    if not plan.validation.paths or plan.mesh.pp == 1:
        return []
    message = f"got {list(plan.validation.paths)}, but with pp = {plan.mesh.pp} a model can't be validated yet"
    fix = "leave [validation] out and validate the checkpoints, or leave pp out"
    return [Diagnostic("validation.paths", message, fix)]
