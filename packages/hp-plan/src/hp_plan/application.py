"""Applying a plan: tensor parallel styles, then fully sharded groups, and plain tensors at the border.

Note [Plain tensors at the border]
Inside a tensor parallel model every activation is a DTensor and the model sees global shapes, which is why its code
runs unchanged. The caller sees plain tensors only: inputs are plain tensors, equal on every rank of the tensor parallel
group, and replicated outputs are returned as plain tensors. So a loss is an ordinary loss, and generation, samplers and
metrics work unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeVar

import hp_dtensor
import hp_fsdp
import hp_offload
import hp_onesided
import hp_pipeline
import hp_platform
from hp_dtensor import DeviceMesh, init_device_mesh
from hp_pipeline import PipelineSchedule
from hp_plan.checks.alike import SharedSamples, agree_on_plan, take_first_weights
from hp_plan.checks.checks import check_model, check_plan, check_platform
from hp_plan.checks.precision import low_precision_experts, low_precision_layers
from hp_plan.features.blocks import compile_blocks, save_less
from hp_plan.features.communication import host_axis, wire_of
from hp_plan.features.experts import expert_styles, spread_experts, with_expert_axes
from hp_plan.features.homes import in_groups, place_homes, with_home_axis
from hp_plan.features.overlap import overlapped
from hp_plan.features.pipelines import check_split, choose_order
from hp_plan.plan import ParallelPlan
from hp_plan.port import models
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.structure.memory import memory_left
from hp_plan.structure.outline import ModelOutline, block_lists, matched_by, matches
from hp_plan.structure.style_tables import choose_styles
from hp_platform import get_platform
from hp_platform.extend import agree, inside_launcher, launch_command, set_transport, share_bytes
from hp_styles import ContextParallel, parallelize_module

Model = TypeVar("Model")

_PATIENCE = 30.0  # seconds, of a rank whose stage failed
_COMPARED = 512  # tokens of a sequence of which parts are compared with the whole, before it is cut into stages


def apply(model: Model, plan: ParallelPlan, mesh: DeviceMesh | None = None) -> Model:
    """Apply a plan to a model, in place and without a change to its code.

    Every rank calls it, with the same plan and a model of the same shapes. Where weights or buffers differ between
    ranks, all take rank 0's, with a warning. Parameters keep their identity: an optimizer may be created before or
    after, but must take its first step, which creates its states, after.

        plan = ParallelPlan.from_toml("qwen3.toml")
        model = apply(model, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    Args:
        model: an `nn.Module` of torch or `nn.Cell` of MindSpore that the plan's patterns fit, with its weights.
        plan: the plan; `plan.model` is not read.
        mesh: the ranks, with the axes of `plan.mesh.axes`; None makes it over all ranks of this kind of device.

    Returns:
        The same model; with an axis `pp` an `hp_pipeline.PipelinedModel`: this rank's stages of it, with its schedule.
        The given model has other stages' weights too: drop it to free their memory.

    Raises:
        PlanError: the plan doesn't fit the model or the number of ranks; it has all diagnostics.
        ValueError: on all ranks: their plans or the shapes of their models differ, or one of them has diagnostics.
        RuntimeError: there is no process group, and no launcher set up the environment to create one.
    """
    set_transport(plan.communication.transport)
    _ensure_process_group(plan)
    platform, port = get_platform(), models()
    ranks = mesh.size() if mesh is not None else platform.groups.size()
    members = list(range(ranks)) if mesh is None else mesh.ranks.reshape(-1).tolist()
    everyone = platform.groups.new_group(members)
    members.sort()
    outline = port.outline(model)

    def diagnose() -> list[Diagnostic]:
        found = [*check_platform(plan), *check_plan(plan, ranks, applied=True)]
        found += [*check_model(plan, outline, applied=True), *check_split(plan, model)]
        return [each for each in found if not each.key.startswith("data.")]  # which `apply` does not read

    agree_on_plan(plan, model, diagnose, members, everyone)
    take_first_weights(model, members, everyone)
    activations = None if plan.memory.budget is None else memory_left(plan, outline)
    axes = plan.mesh.axes
    if mesh is None:
        mesh = _mesh_of(plan)
    _check_mesh(mesh, axes)
    _check_hosts(plan, mesh)
    port.sum_beside_parameters(model)
    lower = [*low_precision_layers(plan, outline), *low_precision_experts(plan, outline)]
    port.lower_precision(model, plan.precision, lower)
    if plan.run.generation == "exact":
        port.make_exact(model)
    if "cp" in axes:
        port.spread_attention(model)
    styles = choose_styles(plan, outline).by_name if "tp" in axes or plan.mesh.ep > 1 else {}
    mesh = with_home_axis(plan, with_expert_axes(plan, mesh, expert_styles(styles)))
    if "pp" in axes:
        return _in_stages(model, plan, mesh, outline, styles, everyone)
    placed = _distribute(model, plan, mesh, outline, styles, outline.modules)
    if outline.balances and plan.mesh.data_parallel * plan.mesh.cp > 1:
        port.balance_all_tokens(model)  # before outputs are whole sequences again
    if "cp" in axes:
        _border(plan, mesh).attach(port.base(model), plain)
    if "tp" in axes:
        port.compare_samples(model, SharedSamples("tp", mesh["tp"].get_group()).compare)
    port.adapt_library_methods(model, tensor_parallel="tp" in axes)
    if activations is not None:
        hp_offload.fit_memory(model, activations, bandwidth=plan.memory.bandwidth, placed=placed)
    return model


def _in_stages(
    model: Any, plan: ParallelPlan, mesh: DeviceMesh, outline: ModelOutline, styles: Mapping[str, str], everyone: Any
) -> Any:
    """Return this rank's stages of the model, each distributed over the ranks that have the same."""
    port, pp = models(), mesh["pp"]
    choice = choose_order(plan, model)
    border = None if "cp" not in plan.mesh.axes else _border(plan, mesh)
    if border is not None and not port.is_empty(model):
        spread = functools.partial(_spread_attention, model, plan, mesh, outline, outline.modules)
        border.compare(port.base(model), spread, min(plan.data.sequence_length, _COMPARED))
    device = get_platform().devices.current_device() if port.is_empty(model) else None
    kinds = {name: type(module) for name, module in port.named_modules(port.base(model))}
    stages: list[Any] = []

    def distribute() -> bytes:
        for index in choice.pipeline.stages[pp.get_local_rank()]:
            stage = choice.split.stage(index)
            # What stands in for modules of other stages has another class.
            here = {name for name, module in port.named_modules(stage) if type(module) is kinds.get(name)}
            alone = {info.parameter.rpartition(".")[0] for info in choice.split.shared_in(index)}
            _distribute(stage, plan, mesh, outline, styles, here, alone)
            stages.append(choice.split.pipeline_stage(index, device))
        return b""

    def failed(texts: Mapping[int, str], error: Exception | None) -> Exception:
        place, text = next(iter(texts.items()))
        return error or ValueError(f"apply: the stages of rank {mesh.ranks.reshape(-1).tolist()[place]}: {text}")

    agree(distribute, failed, functools.partial(share_bytes, group=everyone))  # other stages may fit the plan
    schedule = PipelineSchedule(
        stages,
        choice.pipeline.micro_batches,
        group=pp.get_group(),
        peers=get_platform().groups.new_group(mesh.ranks.reshape(-1).tolist()),
        placement=choice.pipeline.placement,
        order=lambda _: choice.order,
        patience=min(_PATIENCE, plan.run.hang_after / 2 or _PATIENCE),
    )
    pipelined = hp_pipeline.PipelinedModel(schedule)
    _describe(pipelined, model, outline)
    if border is not None:
        border.attach_stages(pipelined)
    _compare_batches(pipelined, {axis: mesh[axis].get_group() for axis in ("pp", "tp") if axis in plan.mesh.axes})
    return pipelined


def _compare_batches(pipelined: Any, groups: Mapping[str, Any]) -> None:
    """Compare the batches of runs between the ranks that share samples, by axis; generation finds them, too."""
    pipelined.sample_groups = groups
    run, all_shared = pipelined.run, [SharedSamples(axis, group, some=axis == "pp") for axis, group in groups.items()]

    @functools.wraps(run)
    def run_same(*args: Any, **kwargs: Any) -> Any:
        for shared in all_shared:
            shared.compare(True, args, kwargs)
        return run(*args, **kwargs)

    pipelined.run = run_same


def _distribute(
    model: Any,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    outline: ModelOutline,
    styles: Mapping[str, str],
    here: Container[str],
    alone: Container[str] = (),
) -> hp_offload.Placed | None:
    """Apply styles, then fully sharded groups, to the model or to a stage of it; return whose cache is of the budget.

    Args:
        model: the model, or a stage of it under its names.
        plan: the plan.
        mesh: of all axes; that of the stages is not used.
        outline: of the whole model.
        styles: name of a module or parameter of the whole model -> its style.
        here: names of the modules that `model` runs itself.
        alone: names of modules that are groups of their own.
    """
    port, axes = models(), plan.mesh.axes
    styles = {
        name: style
        for name, style in styles.items()
        if (name if name in outline.modules else name.rpartition(".")[0]) in here
    }
    experts = expert_styles(styles)
    spread = spread_experts(port.base(model), plan, mesh, outline, experts)
    if "tp" in axes:
        dense = {name: style for name, style in styles.items() if name not in experts}
        parallelize_module(port.base(model), mesh["tp"], overlapped(plan, dense, outline))
    port.shard_adapters(model)
    if "tp" in axes:
        port.replicate_rest(model, mesh["tp"])
        port.keep_border_plain(model, mesh["tp"], plain)
    if "cp" in axes:
        _spread_attention(model, plan, mesh, outline, here)
    if in_groups(plan):
        _shard(model, plan, mesh, outline, spread, here, alone)
    save_less(port.base(model), plan, outline, here)
    compile_blocks(port.base(model), plan, outline, here)
    return place_homes(model, plan)


def _spread_attention(
    model: Any, plan: ParallelPlan, mesh: DeviceMesh, outline: ModelOutline, here: Container[str]
) -> None:
    section = plan.context
    style = ContextParallel(
        ulysses_degree=section.ulysses_degree,
        inner_ring_degree=section.inner_ring_degree,
        load_balance=section.load_balance,
    )
    attention = {name: style for name, each in outline.modules.items() if each.attention and name in here}
    parallelize_module(models().base(model), mesh["cp"], attention)


def _shard(
    model: Any,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    outline: ModelOutline,
    spread: Mapping[str, Mapping[str, Any]],
    here: Container[str],
    alone: Container[str],
) -> None:
    """Make fully sharded groups, inner ones before those around them.

    Args:
        model: as of `_distribute`, like all but `spread`.
        plan: the plan.
        mesh: of all axes.
        outline: of the whole model.
        spread: name of a module of experts -> options of its group.
        here: names of the modules that `model` runs itself.
        alone: names of modules that are groups of their own.
    """
    port, axes = models(), plan.mesh.axes
    over = _joined(mesh, plan.mesh.shard_axes or ("dp_shard",))
    if "dp_replicate" in axes:
        over = mesh["dp_replicate", "_".join(plan.mesh.shard_axes)]
    dtypes = {name: port.dtype(getattr(plan.fsdp, name)) for name in ("param_dtype", "reduce_dtype")}
    options = {
        "mesh": over,
        "reshard_after_forward": plan.fsdp.reshard_after_forward,
        "mp_policy": hp_fsdp.MixedPrecisionPolicy(**dtypes),
        "deterministic": plan.run.deterministic,
    }
    link = hp_offload.SwapManager() if get_platform().name == "torch" else None
    policy = hp_fsdp.CPUOffloadPolicy(link=link)
    groups, homes = plan.fsdp.groups or block_lists(outline), matched_by(plan.memory.homes, outline.names)
    for name, module in reversed(list(port.named_modules(port.base(model)))):
        grouped = name in alone or name in spread or any(matches(pattern, name) for pattern in groups)
        if name and name in here and (grouped or name in homes):
            on_host = plan.fsdp.offload or any(f"{name}.".startswith(f"{home}.") for home in homes)
            own = {"offload_policy": policy if on_host else None, **spread.get(name, {})}
            hp_fsdp.fully_shard(module, **{**options, **own})
    hp_fsdp.fully_shard(model, **options, offload_policy=policy if plan.fsdp.offload else None)
    wire = wire_of(plan)
    if wire is not None:
        model.set_custom_all_reduce(functools.partial(hp_onesided.all_reduce, wire=wire))


def _describe(pipelined: Any, model: Any, outline: ModelOutline) -> None:
    """Tell stages what a checkpoint has of the whole model: its configurations, and which names are one tensor."""
    pipelined.tied_names = {name: names[0] for names in outline.tied for name in names[1:]}
    for name in ("config", "generation_config"):
        if hasattr(model, name):
            setattr(pipelined, name, getattr(model, name))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "architectures") and not config.architectures:
        config.architectures = [type(model).__name__]


def _border(plan: ParallelPlan, mesh: DeviceMesh) -> Any:
    """See Note [Whole sequences at the border] in `hp_plan.features.sequences`."""
    data = _joined(mesh, [axis for axis in ("dp_replicate", *plan.mesh.shard_axes) if axis in plan.mesh.axes])
    return models().border_of(mesh["cp"], data, plan.context.load_balance)


def _joined(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """Return axes of the mesh as one."""
    return mesh[axes[0]] if len(axes) == 1 else mesh[tuple(axes)]._flatten("_".join(axes))


def _ensure_process_group(plan: ParallelPlan) -> None:
    platform = get_platform()
    if platform.groups.is_initialized():
        return
    count = plan.mesh.world_size
    if count > 1 and not inside_launcher():
        raise RuntimeError(
            f"the plan needs {count} ranks, but no launcher started this process: start the script with "
            f"{launch_command(platform.name, count)}, or call hp_platform.init_process_group() first"
        )
    hp_platform.init_process_group()


def _mesh_of(plan: ParallelPlan) -> DeviceMesh:
    kind, axes = get_platform().devices.kind, plan.mesh.axes
    if not plan.mesh.order:
        return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return DeviceMesh(kind, plan.mesh.rank_grid(), tuple(axes))


def _check_hosts(plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Refuse, on all ranks alike, a wire along an axis whose ranks share a host, now that hosts are known."""
    try:
        found = [
            host_axis(axis, dtype) for axis, dtype in plan.communication.wire.items() if mesh.level(axis) == "host"
        ]
    except RuntimeError:  # they are not: in a dry run
        return
    if found:
        raise PlanError(found)


def _check_mesh(mesh: DeviceMesh, axes: Mapping[str, int]) -> None:
    got = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if got != axes:
        raise ValueError(
            f"the mesh has axes {got or tuple(mesh.shape)}, the plan needs {dict(axes)}: leave the mesh out, or make "
            f"it with init_device_mesh(device, {tuple(axes.values())}, mesh_dim_names={tuple(axes)})"
        )


def plain(value: Any) -> Any:
    """Convert replicated DTensors, and scalars once reduced, to plain tensors."""
    if isinstance(value, hp_dtensor.DTensor):
        if all(placement.is_replicate() for placement in value.placements):
            return value.to_local()
        return value.full_tensor() if value.ndim == 0 else value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = plain(value[key])  # In place: transformers' outputs are dictionaries with attributes.
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value
