"""Which samples are a rank's."""

from __future__ import annotations

from hp_plan.plan import ParallelPlan
from hp_platform import get_platform


def data_parallel_rows(plan: ParallelPlan) -> slice:
    """Which samples of the global batch are this rank's; tensor parallel ranks are neighbours with the same ones."""
    parts = plan.mesh.data_parallel
    count = plan.data.batch_size // parts
    part = get_platform().groups.rank() // (plan.mesh.world_size // parts)
    return slice(part * count, (part + 1) * count)
