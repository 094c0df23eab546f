"""Checks of a plan: by its numbers alone, and against the names and shapes of its model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields

from hp_plan.diagnostics import Finding, PlanError, near_misses
from hp_plan.outline import ModelOutline, ModuleOutline, generalise, matching
from hp_plan.plan import ParallelPlan
from hp_plan.tables import resolve, style_table
from hp_platform import get_platform
from hp_styles.extend import ALIASES, PARAMETER_STYLES, STYLES

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


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_faults(plan: ParallelPlan, model: ModelOutline) -> list[Finding]:
    """Every fault of the plan that shows once the model's names and shapes are known."""
    found = [*_group_faults(plan, model), *_expert_faults(plan, model), *_length_faults(plan, model)]
    if plan.mesh.tp == 1 and isinstance(plan.styles, str):
        return found  # No table is looked up where none is used.
    try:
        table = style_table(plan, model)
    except PlanError as error:
        return [*error.findings, *found]
    return [*_style_faults(table, model), *_head_faults(plan, table, model), *_tied_faults(table, model), *found]


def _style_faults(table: Mapping[str, str], model: ModelOutline) -> list[Finding]:
    found = []
    names = model.names
    resolved = resolve(table, model)
    for pattern, style in table.items():
        key = f'styles."{pattern}"'
        matched = matching(pattern, names)
        parameters = [] if matched else matching(pattern, model.parameters)
        if style not in STYLES:
            found.append(Finding(key, f"there is no style '{style}'", near_misses(style, [*STYLES, *ALIASES])))
        elif not matched and (not parameters or style not in PARAMETER_STYLES):
            found.append(_nothing_matches(key, pattern, style, names, parameters))
        for shown, modules in _by_kind(matched if style in STYLES else [], model):
            problem = _unsuited(style, modules[0])
            if problem:
                found.append(Finding(key, f"'{style}' on {shown}, which is a {modules[0].type_name}", problem))
    doubled: dict[tuple[str, ...], list[str]] = {}
    for name, patterns in resolved.items():
        if len(patterns) > 1:
            doubled.setdefault(tuple(patterns), []).append(name)
    for patterns, modules in doubled.items():
        which = " and ".join(f"'{pattern}' = '{table[pattern]}'" for pattern in patterns)
        message = f"{len(patterns)} styles on {_some(modules)}: {which}"
        found.append(
            Finding(f'styles."{patterns[-1]}"', message, "make the patterns exclude each other, or remove one")
        )
    return found


def _nothing_matches(key: str, pattern: str, style: str, names: list[str], parameters: Iterable[str]) -> Finding:
    if parameters:
        fix = f"leave the last part off, or take a style for parameters: {', '.join(PARAMETER_STYLES)}"
        return Finding(key, f"'{pattern}' matches a parameter, and '{style}' is for a module", fix)
    return Finding(key, f"'{pattern}' matches no module", near_misses(pattern, generalise(names)))


def _by_kind(names: Iterable[str], model: ModelOutline) -> list[tuple[str, list[ModuleOutline]]]:
    """Modules by class, with a name to show: a pattern that is wrong for one layer is wrong for all alike."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in names:
        module = model.modules[name]
        kinds.setdefault((module.type_name, module.kind), []).append(name)
    return [(_some(named), [model.modules[name] for name in named]) for named in kinds.values()]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _unsuited(style: str, module: ModuleOutline) -> str | None:
    linear, embedding = module.is_linear, module.kind == "embedding"
    if style in ("packed_rowwise", "grouped_gemm"):
        return "it is for a parameter: name it, as in 'mlp.experts.gate_up_proj'"
    if style.startswith("embedding_") and not embedding:
        return f"use '{style.removeprefix('embedding_')}' for a Linear" if linear else "it is for an Embedding"
    if style.startswith(("colwise", "rowwise", "packed_")) and not linear:
        return f"use 'embedding_{style}' for an Embedding" if embedding else "it is for a Linear"
    return None


def _head_faults(plan: ParallelPlan, table: Mapping[str, str], model: ModelOutline) -> list[Finding]:
    """Attention splits the features of q, k and v into heads: ranks must hold whole ones."""
    found: dict[str, Finding] = {}
    tp = plan.mesh.tp
    for name, patterns in resolve(table, model).items():
        if name not in model.modules:
            continue  # A parameter.
        module, size = model.modules[name], model.modules[name.rpartition(".")[0]].head_dim
        if table[patterns[0]] != "colwise" or module.out_features is None or size is None:
            continue
        heads = module.out_features // size
        if heads % tp:
            shown = generalise([name])[0]
            divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            message = f"{shown} has {heads} heads of {size}, which tp = {tp} ranks do not divide"
            fix = f"make mesh.tp one of {divisors}, or the number of heads a multiple of {tp}"
            found.setdefault(shown, Finding("mesh.tp", message, fix))
    return list(found.values())


def _tied_faults(table: Mapping[str, str], model: ModelOutline) -> list[Finding]:
    found = []
    styled = {name: table[patterns[0]] for name, patterns in resolve(table, model).items()}
    for names in model.tied:
        modules = [name.rpartition(".")[0] for name in names]
        # One without a style that only holds the parameter takes it as it becomes.
        modules = [module for module in modules if module in styled or model.modules[module].kind != "other"]
        dims = {module: _sharded_dim(styled.get(module, "replicate")) for module in modules}
        if len(set(dims.values())) > 1:
            message = f"{' and '.join(names)} are one tensor with " + " and ".join(
                f"'{styled.get(module, 'replicate')}'" for module in modules
            )
            fix = "give them styles that shard the same dim, such as 'embedding_rowwise' and 'colwise_gather_output'"
            found.append(Finding(f'styles."{modules[0]}"', message, fix))
    return found


def _sharded_dim(style: str) -> int | None:
    """Which dim of the weight a style shards."""
    if style.startswith(("colwise", "embedding_rowwise")):
        return 0
    return 1 if style.startswith(("rowwise", "embedding_colwise")) else None


def _group_faults(plan: ParallelPlan, model: ModelOutline) -> list[Finding]:
    found = []
    blocks = _blocks(model)
    if plan.mesh.dp_shard > 1 and not plan.fsdp.groups and blocks:
        message = "no groups, so each rank would gather the whole model at once, as if nothing were sharded"
        fix = f'write groups = ["{blocks}"] in [fsdp], or groups = [""] where the model is to be one group'
        found.append(Finding("fsdp.groups", message, fix))
    for index, pattern in enumerate(plan.fsdp.groups):
        key, matched = f"fsdp.groups[{index}]", matching(pattern, model.names)
        if not matched and pattern:  # "" is the model itself
            fix = near_misses(pattern, generalise(model.names))
            found.append(Finding(key, f"'{pattern}' matches no module", fix))
        for name in matched:
            if model.modules[name].kind == "container":
                message = f"'{pattern}' matches {name}, a {model.modules[name].type_name}, which is never called"
                found.append(Finding(key, message, f"group its members: '{name}.*'"))
    return found


def _blocks(model: ModelOutline) -> str:
    """The pattern of the first list of several modules, outermost first; empty where there is none."""
    for name, module in model.modules.items():
        if name and module.kind == "container" and f"{name}.1" in model.modules:
            return f"{name}.*"
    return ""


def _expert_faults(plan: ParallelPlan, model: ModelOutline) -> list[Finding]:
    found = []
    for name in _EXPERTS:
        experts = getattr(model.config, name, None)
        if isinstance(experts, int) and experts % plan.mesh.ep:
            message = f"{name} is {experts}, which ep = {plan.mesh.ep} ranks do not divide"
            found.append(Finding("mesh.ep", message, f"make mesh.ep a divisor of {experts}"))
    return found


def _length_faults(plan: ParallelPlan, model: ModelOutline) -> list[Finding]:
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or plan.data.sequence_length <= limit:
        return []
    message = f"{plan.data.sequence_length} tokens a sample, and the model's max_position_embeddings is {limit}"
    fix = f"make it at most {limit}, or raise max_position_embeddings in [model.overrides]"
    return [Finding("data.sequence_length", message, fix)]
