"""Primitives of sharding modules, for `hp_fsdp.fully_shard` and `hp_fsdp.hsdp`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor import DeviceMesh
from hp_fsdp.groups.managed_params import roots_of
from hp_fsdp.options import GroupOptions
from hp_fsdp.port import Anatomy
from hp_fsdp.ranks.axes import DataAxes
from hp_fsdp.torch.groups.group import ParameterGroup
from hp_fsdp.torch.groups.parameter import ManagedParameter
from hp_fsdp.torch.module import HSDPModule, shard_class
from hp_fsdp.torch.optimizers import watch_optimizers
from hp_fsdp.torch.steps.context import RootGroup
from hp_platform import get_platform

__all__ = [
    "ANY_DIM",
    "BACKWARD_RETURNS_GRADIENTS",
    "DTYPE",
    "FORWARD",
    "MANAGED",
    "MODULE",
    "ZERO_COPY",
    "anatomy",
    "check_contents",
    "device_of",
    "make_group",
    "modules_of",
    "watch_optimizers",
]

MODULE = nn.Module
FORWARD = "forward"
MANAGED = ManagedParameter
DTYPE = torch.dtype
ZERO_COPY = True
ANY_DIM = True
BACKWARD_RETURNS_GRADIENTS = False


def modules_of(module: Any) -> list[nn.Module]:
    """List the modules of a group: one, or those of a list that are not inside others of it."""
    return roots_of(module, nn.Module, lambda each: each.modules())


def anatomy() -> Anatomy:
    """Return the structure of modules."""
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


def check_contents(modules: Sequence[nn.Module], ignored_params: Collection[nn.Parameter]) -> None:
    """Accept all modules."""


def make_group(
    modules: Sequence[nn.Module],
    parameters: Sequence[ManagedParameter],
    axes: DataAxes,
    device: torch.device,
    options: GroupOptions,
    ignored: Sequence[nn.Parameter],
) -> None:
    """Shard the parameters as one group, and give the modules sharded classes."""
    group: RootGroup = ParameterGroup(modules, parameters, axes, device, options, ignored)
    for each in modules:
        shard_class(each, group)


def device_of(modules: Sequence[nn.Module], parameters: Sequence[ManagedParameter], mesh: DeviceMesh) -> torch.device:
    """Return the device of the shards: meta for parameters on meta, else this process's, where buffers go too."""
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
