"""Which plans can have the same bits on any number of ranks."""

from __future__ import annotations

from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic

_ORDERS = {
    "pp": "gradients of stages are added up in the order of their schedule",
    "cp": "the ranks of cp add up parts of one sample",
    "ep": "experts and all else would be added up in two orders",
}


def check_deterministic(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that gradients are added up in one order, whatever the number of data parallel ranks."""
    if not plan.run.deterministic:
        return []
    return [
        Diagnostic("run.deterministic", f"got true with mesh.{axis} = {getattr(plan.mesh, axis)}, but {why}", fix)
        for axis, why in _ORDERS.items()
        if getattr(plan.mesh, axis) > 1
        for fix in [f"leave run.deterministic out, or make mesh.{axis} 1; dp_replicate, dp_shard and tp go with it"]
    ]
