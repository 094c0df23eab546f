"""How parameters lie on ranks, as `hp_optim.ownership` needs it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from hp_dtensor.torch.extend import DTensor, refuse_foreign
from hp_optim.ownership import OwnerPlan, Placed, assign
from hp_optim.rules import Matrix
from hp_optim.world import own_rank, world_of
from hp_platform import get_platform

__all__ = ["is_distributed", "local_device", "placed_on", "plan_for"]


def placed_on(
    parameter: torch.Tensor, name: str, matrices: tuple[Matrix, ...] = (), settings: Hashable = None
) -> Placed:
    """Describe a parameter to the planner.

    Args:
        parameter: plain or a DTensor.
        name: for errors.
        matrices: of which it is made.
        settings: of its orthogonalization.

    Raises:
        TypeError: a DTensor of torch's own.
        ValueError: a partial parameter.
    """
    refuse_foreign(parameter, f"Muon: parameter {name!r}")
    if not isinstance(parameter, DTensor):
        return Placed(name, tuple(parameter.shape), matrices, (own_rank(),), (), (), settings)
    spec = parameter._spec
    if spec.partial:
        raise ValueError(f"Muon: parameter {name!r} is placed {spec.placements}: reduce it before it is trained")
    ranks = tuple(spec.mesh.ranks.reshape(-1).tolist())
    return Placed(name, spec.shape, matrices, ranks, tuple(spec.mesh.shape), spec.placements, settings)


def plan_for(placed: Sequence[Placed], parameters: Sequence[torch.Tensor]) -> tuple[OwnerPlan, int, torch.device]:
    """Return the owners, this rank, and the device on which matrices are exchanged and computed.

    Args:
        placed: what `placed_on` gave.
        parameters: of which.

    Raises:
        ValueError: the parameters' meshes are parts of different meshes.
    """
    meshes = {parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)}
    world = world_of(meshes)
    device = local_device(parameters[0])
    if device.type == "cpu" and any(mesh.device_type != "cpu" for mesh in meshes):
        device = torch.device(get_platform().devices.current_device())  # offloaded: computed where ranks communicate
    return assign(placed, world or [own_rank()]), own_rank(), device


def is_distributed(parameter: torch.Tensor) -> bool:
    """Tell whether several ranks have a part of a parameter."""
    return isinstance(parameter, DTensor) and parameter._spec.mesh.size() > 1


def local_device(parameter: torch.Tensor) -> torch.device:
    """Return where a parameter's local tensor is."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.device
