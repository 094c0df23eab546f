"""What can be checked of a plan by its numbers alone, without the model."""

from __future__ import annotations

from hp_plan.findings import Finding
from hp_plan.plan import ParallelPlan
from hp_platform import get_platform

# What this version can apply; the others are read, so that a plan may be written for later.
APPLIED_AXES = ("dp_replicate", "dp_shard", "tp")


def plan_faults(plan: ParallelPlan, world_size: int | None = None) -> list[Finding]:
    """Every fault of the plan's own numbers.

    Args:
        plan: the plan.
        world_size: how many ranks there will be; None leaves that unchecked.
    """
    return [*mesh_faults(plan, world_size), *_training_faults(plan)]


def platform_faults(plan: ParallelPlan) -> list[Finding]:
    """A plan that is for another framework than the one in use."""
    wanted, got = plan.run.platform, get_platform().name
    if wanted is None or wanted == got:
        return []
    message = f"the plan is for {wanted}, and this process runs {got}"
    return [Finding("run.platform", message, f"set HYPER_PARALLEL_PLATFORM={wanted} before anything is imported")]


def mesh_faults(plan: ParallelPlan, world_size: int | None = None) -> list[Finding]:
    """Axes that this version can't apply, and a mesh that isn't the world."""
    found = []
    for axis, size in plan.mesh.axes.items():
        if axis not in APPLIED_AXES:
            message = f"{axis} = {size}, and this version has no {axis} axis"
            fix = f"leave it out; the axes are {', '.join(APPLIED_AXES)}"
            found.append(Finding(f"mesh.{axis}", message, fix))
    if world_size is not None and plan.mesh.world_size != world_size:
        product = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes.items())
        message = f"the mesh {product} has {plan.mesh.world_size} ranks, and there are {world_size}"
        fix = f"start {plan.mesh.world_size} ranks (--nproc {plan.mesh.world_size}) or change the sizes in [mesh]"
        found.append(Finding("mesh", message, fix))
    return found


def _training_faults(plan: ParallelPlan) -> list[Finding]:
    found = []
    batch, parts = plan.data.batch_size, plan.mesh.data_parallel
    if batch % parts:
        message = (
            f"the global batch of {batch} does not divide over dp_replicate {plan.mesh.dp_replicate} x dp_shard "
            f"{plan.mesh.dp_shard} = {parts} ranks"
        )
        found.append(
            Finding(
                "data.batch_size", message, f"make it {batch - batch % parts or parts} or another multiple of {parts}"
            )
        )
    if plan.schedule.warmup_steps > plan.run.steps:
        message = f"{plan.schedule.warmup_steps} warm-up steps in a run of {plan.run.steps}"
        found.append(Finding("schedule.warmup_steps", message, f"make it at most {plan.run.steps}"))
    shards = plan.fsdp.reshard_after_forward
    if not isinstance(shards, bool) and (shards < 1 or plan.mesh.dp_shard % shards):
        message = f"{shards} does not divide dp_shard {plan.mesh.dp_shard}"
        fix = f"make it true, false or a divisor of {plan.mesh.dp_shard}"
        found.append(Finding("fsdp.reshard_after_forward", message, fix))
    return found
