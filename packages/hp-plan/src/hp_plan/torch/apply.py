"""A plan done to a model: tensor parallel styles, then fully sharded groups, and plain tensors at the border.

Note [Plain tensors at the border]
Inside a tensor parallel model every activation is a DTensor and the model sees global shapes, which is why its code
runs unchanged. Who calls the model knows nothing of that: inputs are plain tensors that every rank of the tensor
parallel group has alike, and outputs that are replicated come back plain. So a loss is an ordinary loss, and
generation, samplers and metrics work as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Replicate, distribute_tensor, implicit_replication, init_device_mesh
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_plan.checks import mesh_faults
from hp_plan.findings import PlanError
from hp_plan.patterns import matches
from hp_plan.plan import ParallelPlan
from hp_plan.torch.checks import model_faults
from hp_plan.torch.styles import style_passes
from hp_plan.torch.tables import resolve, style_table
from hp_platform import get_platform, init_process_group
from hp_styles import parallelize_module


def apply(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh | None = None) -> nn.Module:
    """Makes a model run as a plan says, in place and without a change to its code.

    Every rank calls it, with the same plan and a model of the same shapes. Optimizers are made afterwards, from
    `model.parameters()`.

        plan = ParallelPlan.from_toml("qwen3.toml")
        model = apply(model, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    Args:
        model: any `nn.Module` that the plan's patterns fit, its weights in place.
        plan: the plan; `plan.model` is not read.
        mesh: the ranks, with the axes of `plan.mesh.axes`; None makes it over all ranks of this kind of device.

    Returns:
        The model that was given.

    Raises:
        PlanError: the plan doesn't fit the model or the number of ranks; every fault is in it.
        RuntimeError: there is no process group and nothing to make one from.
    """
    _ensure_process_group(plan)
    platform = get_platform()
    ranks = mesh.size() if mesh is not None else platform.groups.size()
    found = [*mesh_faults(plan, ranks), *model_faults(plan, model)]
    if found:
        raise PlanError(found)
    axes = plan.mesh.axes
    if mesh is None:
        mesh = init_device_mesh(platform.devices.kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _check_mesh(mesh, axes)
    if "tp" in axes:
        _shard_tensors(model, style_table(plan, model), mesh["tp"])
        _keep_border_plain(model, mesh["tp"])
    if "dp_shard" in axes:
        _shard_groups(model, plan, mesh["dp_replicate", "dp_shard"] if "dp_replicate" in axes else mesh["dp_shard"])
    return model


def _ensure_process_group(plan: ParallelPlan) -> None:
    if get_platform().groups.is_initialized():
        return
    if "RANK" not in os.environ:
        count = plan.mesh.world_size
        raise RuntimeError(
            f"apply needs a process group of {count} ranks and there is none: start the script with "
            f"torchrun --nproc-per-node {count}, or call hp_platform.init_process_group() first"
        )
    init_process_group()


def _check_mesh(mesh: DeviceMesh, axes: Mapping[str, int]) -> None:
    got = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if got != axes:
        raise ValueError(
            f"the mesh has axes {got or tuple(mesh.shape)}, the plan needs {dict(axes)}: leave the mesh out, or make "
            f"it with init_device_mesh(device, {tuple(axes.values())}, mesh_dim_names={tuple(axes)})"
        )


def _shard_tensors(model: nn.Module, table: Mapping[str, str], mesh: DeviceMesh) -> None:
    styled = {name: table[patterns[0]] for name, patterns in resolve(table, model).items()}
    for styles in style_passes(styled):
        parallelize_module(model, mesh, styles)
    made: dict[nn.Parameter, nn.Parameter] = {}  # What was one tensor stays one.
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in made:
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
                made[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])


def _shard_groups(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(plan.fsdp.param_dtype), reduce_dtype=_dtype(plan.fsdp.reduce_dtype)
    )
    for name, module in reversed(list(model.named_modules())):  # Inner groups before the ones around them.
        if any(matches(pattern, name) for pattern in plan.fsdp.groups):
            fully_shard(module, mesh, reshard_after_forward=plan.fsdp.reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh, reshard_after_forward=plan.fsdp.reshard_after_forward, mp_policy=policy)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _keep_border_plain(model: nn.Module, mesh: DeviceMesh) -> None:
    """See Note [Plain tensors at the border]."""
    _run_inside_replication(model)
    model.register_forward_hook(lambda module, inputs, output: _plain(output))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                _take_distributed_inputs(block, mesh)


def _run_inside_replication(module: nn.Module) -> None:
    entered: list[contextlib.ExitStack] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(implicit_replication())
        entered.append(stack)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if entered:
            entered.pop().close()

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)


def _take_distributed_inputs(block: nn.Module, mesh: DeviceMesh) -> None:
    """Activation checkpointing computes a block again in backward, outside the model's forward, from these inputs."""

    def convert(value: Any) -> Any:
        if type(value) is torch.Tensor:
            return DTensor.from_local(value, mesh, [Replicate()])
        return type(value)(map(convert, value)) if type(value) in (list, tuple) else value

    def enter(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not module.training:
            return None
        return tuple(map(convert, inputs)), {name: convert(value) for name, value in keywords.items()}

    block.register_forward_pre_hook(enter, with_kwargs=True)


def _plain(value: Any) -> Any:
    """The value with replicated DTensors, and reduced scalars, as plain tensors."""
    if isinstance(value, DTensor):
        if all(placement.is_replicate() for placement in value.placements):
            return value.to_local()
        return value.full_tensor() if value.ndim == 0 else value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _plain(value[key])  # In place: transformers' outputs are dictionaries with attributes.
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value
