"""Where PyTorch's parameters are, for `hp_optim.muon.world`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor, refuse_foreign
from hp_optim.muon.newton_schulz import Orthogonalization
from hp_optim.muon.ownership import OwnerPlan, Placed, assign
from hp_optim.muon.rules import Matrix
from hp_optim.muon.world import placed_as
from hp_platform import get_platform


def placed_on(parameter: torch.Tensor, name: str, matrices: tuple[Matrix, ...], settings: Orthogonalization) -> Placed:
    """Describe a parameter, plain or a DTensor, to the planner; see `hp_optim.muon.world.placed_as`.

    Raises:
        TypeError: a DTensor of torch's own.
        ValueError: a partial parameter.
    """
    refuse_foreign(parameter, f"Muon: parameter {name!r}")
    return placed_as(name, parameter.shape, layout_of(parameter), matrices, settings)


def device_for(parameter: torch.Tensor, meshes: set[Any]) -> torch.device:
    """Return the device on which matrices are exchanged and computed.

    Args:
        parameter: one of those on one device.
        meshes: of all parameters.
    """
    device = local_device(parameter)
    if device.type == "cpu" and any(mesh.device_type != "cpu" for mesh in meshes):
        device = torch.device(get_platform().devices.current_device())  # offloaded: computed where ranks communicate
    return device


def plan_for(placed: Sequence[Placed], world: Sequence[int]) -> OwnerPlan:
    """Return the owners.

    Args:
        placed: see `placed_on`.
        world: the ranks that exchange.

    Raises:
        ValueError: a rank can't tell which part of a parameter another has.
    """
    try:
        return assign(placed, world)
    except ValueError as error:
        raise ValueError(
            f"Muon: a layout is not the same on all ranks: {error}. Where fully_shard cuts tensor parallel parts of"
            " different sizes, make the features divide by the ranks, or shard another dim by shard_placement_fn"
        ) from error


def meshes_of(parameters: Sequence[torch.Tensor]) -> set[Any]:
    """Return the meshes of those that are DTensors."""
    return {parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)}


def is_distributed(parameter: torch.Tensor) -> bool:
    """Tell whether several ranks have a part of a parameter."""
    return isinstance(parameter, DTensor) and parameter._spec.mesh.size() > 1


def layout_of(parameter: torch.Tensor) -> Any:
    """Return the layout of a DTensor, None of a plain tensor."""
    return parameter._spec if isinstance(parameter, DTensor) else None


def local_device(parameter: torch.Tensor) -> torch.device:
    """Return where a parameter's local tensor is."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.device
