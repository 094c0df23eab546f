"""Checks of a plan: by its numbers alone, and against the names and shapes of its model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from hp_optim.extend import is_hidden_matrix
from hp_plan.checks.alike import check_deterministic
from hp_plan.checks.exact import check_exact, check_exact_dtype, check_exact_model
from hp_plan.checks.monitor.checks import check_monitor, check_monitored
from hp_plan.checks.precision import check_layers, check_precision, check_styled_layers
from hp_plan.checks.sdc.checks import check_sdc
from hp_plan.checks.styles import check_styles
from hp_plan.checks.unused_keys import check_best, check_profile, check_unused_keys, check_validation
from hp_plan.features.adapters import check_adapter
from hp_plan.features.blocks import check_activations, check_compile, check_compiled, check_saving
from hp_plan.features.communication import check_communication
from hp_plan.features.experts import (
    check_auxiliary_loss,
    check_expert_axis,
    check_expert_options,
    check_experts,
)
from hp_plan.features.homes import check_home_values, check_homes
from hp_plan.features.loss import check_accumulation, check_balance, check_objective, check_scores
from hp_plan.features.optimizers import check_group_values, check_groups, check_tied_groups
from hp_plan.features.overlap import check_overlap, check_overlapped
from hp_plan.features.pipelines import check_pipeline
from hp_plan.features.sequences import (
    check_answers,
    check_attention,
    check_context,
    check_packing,
    check_scattered,
    check_sequence,
)
from hp_plan.plan import ParallelPlan
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import check_budget, check_memory, check_states
from hp_plan.structure.outline import (
    ModelOutline,
    generalise,
    matches_nothing,
    matching,
    never_called,
    positions,
)
from hp_plan.structure.style_tables import choose_styles
from hp_platform import get_platform
from hp_platform.extend import inside_launcher, launch_command

# What this version can apply, by framework; the others are read, so that a plan may be written for later.
APPLIED_AXES = {
    "torch": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "mindspore": ("dp_replicate", "dp_shard", "tp"),
}
_BY_HAND = "leave it out, or write the stages as Cells and run them by hp_pipeline.Schedule1F1B"


@dataclass(frozen=True)
class Check:
    """A check of a plan.

    Attributes:
        function: returns what is wrong; it takes the plan, and what it reads.
        reads: "numbers", those of the plan itself; "model", the names and shapes of the model, as
            ``function(plan, outline)``; "styles", those of its modules too, as ``function(plan, styles, outline)``.
        apply: whether `apply` reads what is checked; False: a run of the trainer alone does.
    """

    function: Callable[..., list[Diagnostic]]
    reads: Literal["numbers", "model", "styles"] = "numbers"
    apply: bool = True


def check_plan(plan: ParallelPlan, world_size: int | None = None, *, applied: bool = False) -> list[Diagnostic]:
    """Check the plan's own numbers.

    Args:
        plan: the plan.
        world_size: number of ranks; None leaves that unchecked.
        applied: leave out what `apply` does not read.
    """
    return [*check_mesh(plan, world_size), *_found("numbers", applied, plan)]


def _found(reads: str, applied: bool, *values: Any) -> list[Diagnostic]:
    checks = (check for check in CHECKS if check.reads == reads and (check.apply or not applied))
    return [each for check in checks for each in check.function(*values)]


def check_platform(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the plan is for the framework in use."""
    expected, got = plan.run.platform, get_platform().name
    if expected is None or expected == got:
        return []
    message = f"the plan is for {expected}, but this process runs {got}"
    return [Diagnostic("run.platform", message, f"set HYPER_PARALLEL_PLATFORM={expected} before anything is imported")]


def check_mesh(plan: ParallelPlan, world_size: int | None = None) -> list[Diagnostic]:
    """Check that this version can apply every axis, and that the mesh has as many ranks as the world."""
    diagnostics = []
    applied = APPLIED_AXES[get_platform().name]
    for axis, size in {**plan.mesh.axes, **({"ep": plan.mesh.ep} if plan.mesh.ep > 1 else {})}.items():
        if axis == "pp" and axis not in applied:
            message = f"pp = {size}, but this version does not split Cells into stages"
            fix = f"{_BY_HAND}; the axes are {', '.join(applied)}"
            diagnostics.append(Diagnostic("mesh.pp", message, fix))
        elif axis not in applied:
            message = f"{axis} = {size}, but this version has no {axis} axis"
            fix = f"leave it out; the axes are {', '.join(applied)}"
            diagnostics.append(Diagnostic(f"mesh.{axis}", message, fix))
    diagnostics += check_expert_axis(plan)
    if world_size is not None and plan.mesh.world_size != world_size:
        product = plan.mesh.described
        message = f"the mesh {product} has {plan.mesh.world_size} ranks, but there are {world_size}"
        count = plan.mesh.world_size
        command = launch_command(get_platform().name, count) if inside_launcher() else f"--nproc {count}"
        fix = f"start {count} ranks ({command}) or change the sizes in [mesh]"
        diagnostics.append(Diagnostic("mesh", message, fix))
    return diagnostics


def check_fsdp(plan: ParallelPlan) -> list[Diagnostic]:
    """Check the options of `fully_shard`: those this version lacks, and those without effect on this mesh."""
    diagnostics = []
    options = [item.name for item in fields(plan.fsdp) if getattr(plan.fsdp, item.name) != item.default]
    axes = plan.mesh.axes
    if options and not plan.mesh.shard_axes:
        mesh = plan.mesh.described
        message = f"{', '.join(options)} would have no effect: the mesh {mesh} shards over no dp_shard or cp axis"
        fix = "leave [fsdp] out, or make mesh.dp_shard at least 2 (run.dtype is the dtype of the weights without it)"
        diagnostics.append(Diagnostic("fsdp", message, fix))
    shards, size = plan.fsdp.reshard_after_forward, math.prod(axes[name] for name in plan.mesh.shard_axes)
    if plan.mesh.shard_axes and not isinstance(shards, bool):
        if plan.mesh.ep > 1:
            message = f"got {shards} with mesh.ep = {plan.mesh.ep}, whose experts are sharded over other ranks"
            diagnostics.append(Diagnostic("fsdp.reshard_after_forward", message, "make it true or false"))
        elif size % shards:
            divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
            message = f"got {shards} ranks, which do not divide the {size} that parameters are sharded over"
            diagnostics.append(Diagnostic("fsdp.reshard_after_forward", message, f"make it one of {divisors}"))
    return diagnostics


def _check_device(plan: ParallelPlan) -> list[Diagnostic]:
    """Check that the device in use computes in the plan's dtypes."""
    if get_platform().name != "mindspore" or get_platform().devices.kind != "cpu":
        return []
    message = "got 'bfloat16', for which MindSpore has no matrix product on the CPU"
    fix = "make it 'float32', or run the plan on an Ascend NPU"
    dtypes = {"run.dtype": plan.run.dtype, "fsdp.param_dtype": plan.fsdp.param_dtype}
    return [Diagnostic(key, message, fix) for key, dtype in dtypes.items() if dtype == "bfloat16"]


def _check_training(plan: ParallelPlan) -> list[Diagnostic]:
    diagnostics = []
    batch, parts = plan.data.batch_size, plan.mesh.data_parallel
    if batch % parts:
        message = (
            f"the global batch of {batch} does not divide over dp_replicate {plan.mesh.dp_replicate} x dp_shard "
            f"{plan.mesh.dp_shard} = {parts} ranks"
        )
        diagnostics.append(
            Diagnostic(
                "data.batch_size", message, f"make it {batch - batch % parts or parts} or another multiple of {parts}"
            )
        )
    for name in () if plan.data.shuffle else ("packing", "weights"):
        if getattr(plan.data, name):
            message = f"got false, but with data.{name} samples do not follow the order of files"
            diagnostics.append(Diagnostic("data.shuffle", message, f"leave it out, or leave data.{name} out"))
    if plan.schedule.warmup_steps > plan.run.steps:
        message = f"{plan.schedule.warmup_steps} warm-up steps in a run of {plan.run.steps}"
        diagnostics.append(Diagnostic("schedule.warmup_steps", message, f"make it at most {plan.run.steps}"))
    return diagnostics


def check_model(plan: ParallelPlan, model: ModelOutline, *, applied: bool = False) -> list[Diagnostic]:
    """Check the plan against the model's names and shapes.

    Args:
        plan: the plan.
        model: its model.
        applied: leave out what `apply` does not read.
    """
    found = _found("model", applied, plan, model)
    if plan.mesh.tp == plan.mesh.ep == 1 and isinstance(plan.styles, str):
        return found  # No table is looked up where none is used.
    try:
        choice = choose_styles(plan, model)
    except PlanError as error:
        return [*error.diagnostics, *found]
    styled = _found("styles", applied, plan, choice.by_name, model)
    return [*check_styles(plan, choice, model), *styled, *found]


def _check_groups(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    diagnostics = []
    for index, pattern in enumerate(plan.fsdp.groups):
        key, matched = f"fsdp.groups[{index}]", matching(pattern, model.names)
        if not matched and pattern:  # "" is the model itself
            diagnostics.append(matches_nothing(key, pattern, model.names))
        found = (never_called(key, pattern, name, model, verb="group") for name in matched)
        diagnostics += [each for each in found if each is not None]
    return diagnostics


def _check_optimizer(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    diagnostics = []
    section = plan.optimizer
    shapes = {
        f"{name}.{key}" if name else key: shape
        for name, module in model.modules.items()
        for key, shape in module.shapes.items()
    }
    for index, pattern in enumerate(section.muon):
        key, matched = f"optimizer.muon[{index}]", matching(pattern, model.parameters)
        if not matched:
            diagnostics.append(matches_nothing(key, pattern, model.parameters, what="parameter"))
        flat = [name for name in matched if len(shapes.get(name, (1, 1))) < 2]
        if flat:
            message = f"'{pattern}' matches {flat[0]} of shape {shapes[flat[0]]}, which is no matrix"
            matrices = generalise(name for name, shape in shapes.items() if is_hidden_matrix(name, len(shape)))
            fix = "match matrices alone" + (f", such as '{matrices[0]}'" if matrices else "")
            diagnostics.append(Diagnostic(key, message, fix))
    names = model.parameters
    if plan.mesh.pp > 1:  # a tied tensor has another name on another stage
        names = tuple(dict.fromkeys([*names, *(name for tied in model.tied for name in tied)]))
    return [*diagnostics, *check_groups(plan, names), *check_tied_groups(plan, model)]


def _check_length(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    limit = positions(model.config)
    if limit is None or plan.data.sequence_length <= limit:
        return []
    message = f"{plan.data.sequence_length} tokens per sample, but the model's max_position_embeddings is {limit}"
    fix = f"make it at most {limit}, or raise max_position_embeddings in [model.overrides]"
    return [Diagnostic("data.sequence_length", message, fix)]


CHECKS = (
    Check(_check_training, apply=False),
    Check(check_unused_keys, apply=False),
    Check(check_pipeline),
    Check(check_fsdp),
    Check(check_communication),
    Check(check_memory),
    Check(check_home_values),
    Check(check_states),
    Check(check_context),
    Check(check_overlap),
    Check(check_precision),
    Check(check_sequence, apply=False),
    Check(check_accumulation, apply=False),
    Check(check_deterministic),
    Check(check_exact),
    Check(check_exact_dtype, apply=False),
    Check(check_validation, apply=False),
    Check(check_best, apply=False),
    Check(check_profile, apply=False),
    Check(check_monitor, apply=False),
    Check(check_sdc, apply=False),
    Check(check_saving),
    Check(check_group_values, apply=False),
    Check(check_compile),
    Check(check_expert_options),
    Check(check_adapter, apply=False),
    Check(check_objective, apply=False),
    Check(_check_device),
    Check(_check_groups, "model"),
    Check(_check_length, "model"),
    Check(check_auxiliary_loss, "model"),
    Check(_check_optimizer, "model"),
    Check(check_attention, "model"),
    Check(check_packing, "model"),
    Check(check_exact_model, "model"),
    Check(check_answers, "model"),
    Check(check_balance, "model"),
    Check(check_scores, "model"),
    Check(check_activations, "model"),
    Check(check_compiled, "model"),
    Check(check_homes, "model"),
    Check(check_layers, "model"),
    Check(check_budget, "model", apply=False),
    Check(check_monitored, "model", apply=False),
    Check(check_experts, "styles"),
    Check(check_scattered, "styles"),
    Check(check_overlapped, "styles"),
    Check(check_styled_layers, "styles"),
)
"""All checks, in the order in which what they find is shown."""
