"""What `shard_module` does to a torch module's parameters; the plan is read in `hp_dtensor.sharding_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement, Replicate
from hp_dtensor.torch.api import distribute_tensor, replicate_parameters

__all__ = ["Tensor", "distribute", "named_modules", "named_parameters"]

Tensor = torch.Tensor


def named_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """All modules inside, the module itself among them, each under every name that it has."""
    return dict(module.named_modules(remove_duplicate=False))


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All parameters, each under every name that it has."""
    return dict(module.named_parameters(remove_duplicate=False))


def distribute(
    module: torch.nn.Module, placed: Mapping[str, tuple[DeviceMesh, tuple[Placement, ...]]], rest: DeviceMesh
) -> None:
    """Makes all parameters and buffers DTensors; modules that share a parameter share it afterwards.

    Args:
        module: the module, changed in place.
        placed: mesh and placements by name of a parameter.
        rest: the mesh on which other parameters, and buffers, are replicated.
    """
    parameters = named_parameters(module)
    by_id: dict[int, Any] = {id(parameters[name]): where for name, where in placed.items()}
    made: dict[int, torch.nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                mesh, placements = by_id.get(id(parameter), (rest, (Replicate(),) * rest.ndim))
                new = torch.nn.Parameter(distribute_tensor(parameter.data, mesh, placements), parameter.requires_grad)
                vars(new).update({k: v for k, v in parameter.__dict__.items() if k not in new.__dict__})
                made[id(parameter)] = new
            child._parameters[name] = made[id(parameter)]
        replicate_parameters(child, rest)  # the buffers that are left
