"""The part of `shard_module` that changes a torch module; `hp_dtensor.creation.sharding_plan` reads the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hp_dtensor.layout.placements import Placement, Replicate
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.torch.api import distribute_parameter, replicate_parameters

Tensor = torch.Tensor


def named_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """List all modules inside, the module itself among them, each under every name that it has."""
    return dict(module.named_modules(remove_duplicate=False))


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """List all parameters, each under every name that it has."""
    return dict(module.named_parameters(remove_duplicate=False))


def distribute(
    module: torch.nn.Module, placed: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]], rest: DeviceMesh
) -> None:
    """Turn all parameters and buffers into DTensors; modules that share a parameter share it afterwards.

    Args:
        module: the module, changed in place.
        placed: mesh and placements by name of a parameter.
        rest: the mesh on which other parameters, and buffers, are replicated.
    """
    parameters = named_parameters(module)
    by_id: dict[int, Any] = {id(parameters[name]): where for name, where in placed.items()}
    for parameter in module.parameters():
        mesh, placements = by_id.get(id(parameter), (rest, (Replicate(),) * rest.ndim))
        distribute_parameter(parameter, mesh, placements)
    for child in module.modules():
        replicate_parameters(child, rest)  # only buffers are still plain
