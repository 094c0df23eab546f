"""Sharding modules, for `hp_fsdp.fully_shard` and `hp_fsdp.hsdp`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh
from hp_fsdp.anatomy import Anatomy
from hp_fsdp.axes import DataAxes
from hp_fsdp.finding import find_parameters
from hp_fsdp.mesh_dims import all_ranks
from hp_fsdp.optimizers import ignore
from hp_fsdp.options import GroupOptions
from hp_fsdp.several import roots_of
from hp_fsdp.sharded_class import group_of
from hp_fsdp.torch.group import ParameterGroup
from hp_fsdp.torch.module import HSDPModule, shard_class
from hp_fsdp.torch.optimizers import watch_optimizers
from hp_fsdp.torch.parameter import ManagedParameter
from hp_platform import get_platform

__all__ = [
    "ANY_DIM",
    "BACKWARD_RETURNS_GRADIENTS",
    "DTYPE",
    "ZERO_COPY",
    "anatomy",
    "check_module",
    "modules_of",
    "shard",
]

DTYPE = torch.dtype
ZERO_COPY = True
ANY_DIM = True
BACKWARD_RETURNS_GRADIENTS = False


def modules_of(module: Any) -> list[nn.Module]:
    """List the modules of a group: one, or those of a list that are not inside others of it."""
    return roots_of(module, nn.Module, lambda each: each.modules())


def anatomy() -> Anatomy:
    """Get where modules have their parts."""
    return Anatomy(
        parameters="_parameters",
        children="_modules",
        sharded=HSDPModule,
        computes=_computes,
        nbytes=lambda parameter: parameter.numel() * parameter.element_size(),
    )


def _computes(module: nn.Module) -> bool:
    """Tell whether a module has a forward of its own, which a plain ``ModuleList`` lacks."""
    return not (isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward)


def shard(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    options: GroupOptions,
    ignored_params: Collection[nn.Parameter] = (),
) -> None:
    """Shards modules as one group, with arguments that were checked.

    Args:
        modules: changed in place.
        mesh: of one axis or two; None for all ranks.
        options: how the group communicates.
        ignored_params: parameters to leave as they are.
    """
    ignored: list[Any] = list(ignored_params)
    found = find_parameters(modules, ignored, ManagedParameter)
    mesh = all_ranks(found) if mesh is None else mesh
    axes = DataAxes.of(mesh)
    parameters = [p for p in found if p.copied or not axes.divided(p.name, p.inner)]
    ignored += [p.original for p in found if p not in parameters]
    device = _device(modules, parameters, mesh)
    watch_optimizers()
    for parameter in ignored:
        ignore(parameter)
    group = ParameterGroup(modules, parameters, axes, device, options, ignored)
    for each in modules:
        shard_class(each, group)


def check_module(module: Any) -> None:
    """Raises for what `fully_shard` cannot be called on."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard: expected a torch.nn.Module, got {type(module).__name__}")
    name = type(module).__name__
    if not _computes(module):
        raise ValueError(f"fully_shard: {name} has no forward of its own. Call fully_shard on each of its modules")
    if group_of(module) is not None:
        raise ValueError(f"fully_shard: this {name} is sharded already")


def _device(modules: Sequence[nn.Module], parameters: list[ManagedParameter], mesh: DeviceMesh) -> torch.device:
    """Where the shards live: meta with parameters on meta, else this process's device, where buffers are moved, too."""
    on_meta = [p.name for p in parameters if p.original is not None and p.original.is_meta]
    if on_meta and len(on_meta) < len(parameters):
        raise ValueError(
            f"fully_shard: {len(on_meta)} of {len(parameters)} parameters of {type(modules[0]).__name__} are on the"
            f" meta device ({', '.join(on_meta[:3])}, ...): all or none of a group may be"
        )
    if on_meta:
        return torch.device("meta")
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    device = get_platform().devices.current_device()
    for each in itertools.chain.from_iterable(module.modules() for module in modules):
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                each._buffers[name] = buffer.to(device)
    return device
