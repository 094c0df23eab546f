"""Checks of a plan: by its numbers alone, and against the names and shapes of its model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from hp_optim.extend import is_hidden_matrix
from hp_plan.checks.alike import check_deterministic
from hp_plan.checks.unused_keys import check_best, check_profile, check_unused_keys, check_validation
from hp_plan.features.adapters import check_adapter
from hp_plan.features.blocks import check_activations, check_compile, check_compiled, check_saving
from hp_plan.features.communication import check_communication
from hp_plan.features.experts import (
    EXPERT_STYLES,
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
from hp_plan.reading.diagnostics import Diagnostic, PlanError, near_misses
from hp_plan.structure.memory import check_memory, check_states
from hp_plan.structure.outline import (
    ModelOutline,
    ModuleOutline,
    block_lists,
    generalise,
    matches_nothing,
    matching,
    never_called,
    positions,
)
from hp_plan.structure.style_tables import StyleChoice, choose_styles, packed_experts
from hp_platform import get_platform
from hp_platform.extend import inside_launcher, launch_command
from hp_styles.extend import ALIASES, PARAMETER_STYLES, STYLES

# What this version can apply, by framework; the others are read, so that a plan may be written for later.
APPLIED_AXES = {
    "torch": ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"),
    "mindspore": ("dp_replicate", "dp_shard", "tp"),
}
_BY_HAND = "leave it out, or write the stages as Cells and run them by hp_pipeline.Schedule1F1B"


def check_plan(plan: ParallelPlan, world_size: int | None = None) -> list[Diagnostic]:
    """Check the plan's own numbers.

    Args:
        plan: the plan.
        world_size: number of ranks; None leaves that unchecked.
    """
    diagnostics = check_mesh(plan, world_size)
    for check in _OF_NUMBERS:
        diagnostics += check(plan)
    return diagnostics


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


def check_model(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    """Check the plan against the model's names and shapes."""
    diagnostics = [*_check_groups(plan, model), *_check_length(plan, model), *check_auxiliary_loss(plan, model)]
    diagnostics += [*_check_optimizer(plan, model), *check_attention(plan, model, blocks_of(model))]
    diagnostics += [*check_packing(plan, model), *check_answers(plan, model), *check_balance(plan, model)]
    diagnostics += check_scores(plan, model)
    diagnostics += [*check_activations(plan, model), *check_compiled(plan, model), *check_homes(plan, model)]
    if plan.mesh.tp == plan.mesh.ep == 1 and isinstance(plan.styles, str):
        return diagnostics  # No table is looked up where none is used.
    try:
        choice = choose_styles(plan, model)
    except PlanError as error:
        return [*error.diagnostics, *diagnostics]
    return [
        *_check_styles(choice, model),
        *_check_heads(plan, choice, model),
        *_check_tied(choice, model),
        *check_experts(plan, choice.by_name, model),
        *check_scattered(plan, choice.by_name, model),
        *check_overlapped(plan, choice.by_name, model),
        *diagnostics,
    ]


def _check_styles(choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    diagnostics = []
    names, table = model.names, choice.table
    for pattern, style in table.items():
        key = f'styles."{pattern}"'
        matched = matching(pattern, names)
        parameters = [] if matched else matching(pattern, model.parameters)
        known = style in STYLES or style in EXPERT_STYLES
        if not known:
            names_of_styles = [*STYLES, *EXPERT_STYLES, *ALIASES]
            diagnostics.append(Diagnostic(key, f"there is no style '{style}'", near_misses(style, names_of_styles)))
        elif not matched and (not parameters or style not in PARAMETER_STYLES):
            diagnostics.append(_nothing_matches(key, pattern, style, names, parameters))
        for shown, modules in _by_kind(matched if known else [], model):
            problem = _unsuited(style, modules[0])
            if problem:
                diagnostics.append(Diagnostic(key, f"'{style}' on {shown}, which is a {modules[0].type_name}", problem))
    for pattern, style in packed_experts(table, model).items():
        message = f"'{table[pattern]}' on a matrix that holds a gate's features and then those of up"
        diagnostics.append(Diagnostic(f'styles."{pattern}"', message, f"write '{style}', which shards each of the two"))
    doubled: dict[tuple[str, ...], list[str]] = {}
    for name, patterns in choice.matches.items():
        if len(patterns) > 1:
            doubled.setdefault(tuple(patterns), []).append(name)
    for patterns, modules in doubled.items():
        which = " and ".join(f"'{pattern}' = '{table[pattern]}'" for pattern in patterns)
        message = f"{len(patterns)} styles on {_some(modules)}: {which}"
        diagnostics.append(
            Diagnostic(f'styles."{patterns[-1]}"', message, "make the patterns exclude each other, or remove one")
        )
    return diagnostics


def _nothing_matches(key: str, pattern: str, style: str, names: list[str], parameters: Iterable[str]) -> Diagnostic:
    if parameters:
        fix = f"leave the last part off, or take a style for parameters: {', '.join(PARAMETER_STYLES)}"
        return Diagnostic(key, f"'{pattern}' matches a parameter, but '{style}' is for a module", fix)
    return matches_nothing(key, pattern, names)


def _by_kind(names: Iterable[str], model: ModelOutline) -> list[tuple[str, list[ModuleOutline]]]:
    """Group modules by class, each with a name to show: a pattern wrong for one layer is wrong for all alike."""
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
        if not embedding:
            return "it is for a Linear"
        named = f"embedding_{style}"
        suited = named if named in STYLES else f"embedding_{style.removeprefix('packed_').partition('_')[0]}"
        return f"use '{suited}' for an Embedding"
    return None


def _check_heads(plan: ParallelPlan, choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    """Attention splits the features of q, k and v into heads: ranks must hold whole ones."""
    diagnostics: dict[str, Diagnostic] = {}
    tp = plan.mesh.tp
    for name, style in choice.by_name.items():
        if name not in model.modules:
            continue  # A parameter.
        module, size = model.modules[name], model.modules[name.rpartition(".")[0]].head_dim
        if style != "colwise" or module.out_features is None or size is None:
            continue
        heads = module.out_features // size
        if heads % tp:
            shown = generalise([name])[0]
            divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
            message = f"{shown} has {heads} heads of size {size}, which tp = {tp} does not divide"
            fix = f"make mesh.tp one of {divisors}, or the number of heads a multiple of {tp}"
            diagnostics.setdefault(shown, Diagnostic("mesh.tp", message, fix))
    return list(diagnostics.values())


def _check_tied(choice: StyleChoice, model: ModelOutline) -> list[Diagnostic]:
    diagnostics = []
    styled = choice.by_name
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
            diagnostics.append(Diagnostic(f'styles."{modules[0]}"', message, fix))
    return diagnostics


def _sharded_dim(style: str) -> int | None:
    """Return the dim of the weight that a style shards."""
    if style.startswith(("colwise", "embedding_rowwise")):
        return 0
    return 1 if style.startswith(("rowwise", "embedding_colwise")) else None


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


def blocks_of(model: ModelOutline) -> str:
    """Return the pattern of the first list of several modules, outermost first; empty if there is none."""
    return next(iter(block_lists(model)), "")


def _check_length(plan: ParallelPlan, model: ModelOutline) -> list[Diagnostic]:
    limit = positions(model.config)
    if limit is None or plan.data.sequence_length <= limit:
        return []
    message = f"{plan.data.sequence_length} tokens per sample, but the model's max_position_embeddings is {limit}"
    fix = f"make it at most {limit}, or raise max_position_embeddings in [model.overrides]"
    return [Diagnostic("data.sequence_length", message, fix)]


# Each takes a plan, and reads its numbers alone.
_OF_NUMBERS = (
    _check_training,
    check_unused_keys,
    check_pipeline,
    check_fsdp,
    check_communication,
    check_memory,
    check_home_values,
    check_states,
    check_context,
    check_overlap,
    check_sequence,
    check_accumulation,
    check_deterministic,
    check_validation,
    check_best,
    check_profile,
    check_saving,
    check_group_values,
    check_compile,
    check_expert_options,
    check_adapter,
    check_objective,
    _check_device,
)
