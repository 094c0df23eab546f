"""Models with a plan applied."""

from __future__ import annotations

from mindspore import nn

from hp_dtensor import DeviceMesh
from hp_plan.application import apply
from hp_plan.mindspore.build import build_model
from hp_plan.plan import ParallelPlan


def build_parallel_model(plan: ParallelPlan, mesh: DeviceMesh | None = None) -> nn.Cell:
    """Build the model of `plan.model` and apply the plan to it: `apply(build_model(plan), plan, mesh)`."""
    return apply(build_model(plan), plan, mesh)
