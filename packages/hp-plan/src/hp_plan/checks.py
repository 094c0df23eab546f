"""What can be checked of a plan by its numbers alone, without the model."""

from __future__ import annotations

import os
from dataclasses import fields

from hp_plan.findings import Finding
from hp_plan.plan import ParallelPlan
from hp_platform import get_platform

# What this version can apply; the others are read, so that a plan may be written for later.
APPLIED_AXES = ("dp_replicate", "dp_shard", "tp")
LAUNCHERS = {"torch": "torchrun --nproc-per-node {0}", "mindspore": "msrun --worker_num={0} --local_worker_num={0}"}


def plan_faults(plan: ParallelPlan, world_size: int | None = None) -> list[Finding]:
    """Every fault of the plan's own numbers.

    Args:
        plan: the plan.
        world_size: how many ranks there will be; None leaves that unchecked.
    """
    return [*mesh_faults(plan, world_size), *_training_faults(plan), *fsdp_faults(plan), *_device_faults(plan)]


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
        knob = LAUNCHERS[get_platform().name] if inside_launcher() else "--nproc {0}"
        count = plan.mesh.world_size
        fix = f"start {count} ranks ({knob.format(count)}) or change the sizes in [mesh]"
        found.append(Finding("mesh", message, fix))
    return found


def fsdp_faults(plan: ParallelPlan) -> list[Finding]:
    """Options of `fully_shard` that this version doesn't have, or that the mesh has no use for."""
    found = []
    given = [item.name for item in fields(plan.fsdp) if getattr(plan.fsdp, item.name) != item.default]
    axes = plan.mesh.axes
    if given and "dp_shard" not in axes:
        mesh = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        message = f"{', '.join(given)} would have no effect: the mesh {mesh} shards over no dp_shard axis"
        fix = "leave [fsdp] out, or make mesh.dp_shard at least 2 (run.dtype is the dtype of the weights without it)"
        found.append(Finding("fsdp", message, fix))
    shards = plan.fsdp.reshard_after_forward
    if not isinstance(shards, bool):
        message = f"got {shards}, the size of a smaller group to reshard to, which this version can't do"
        fix = "make it true (least memory) or false (gathered until backward, least communication)"
        found.append(Finding("fsdp.reshard_after_forward", message, fix))
    return found


def _device_faults(plan: ParallelPlan) -> list[Finding]:
    """Dtypes that the device in use can't compute in."""
    if get_platform().name != "mindspore" or get_platform().devices.kind != "cpu":
        return []
    message = "got 'bfloat16', of which MindSpore has no matrix product on the CPU"
    fix = "make it 'float32', or run the plan on an Ascend NPU"
    dtypes = {"run.dtype": plan.run.dtype, "fsdp.param_dtype": plan.fsdp.param_dtype}
    return [Finding(key, message, fix) for key, dtype in dtypes.items() if dtype == "bfloat16"]


def inside_launcher() -> bool:
    """Whether torchrun or msrun has started this process."""
    return not {"RANK", "MS_ROLE"}.isdisjoint(os.environ)


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
    return found
