"""Where PyTorch's parameters are, for `hp_optim.world`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_dtensor.torch.extend import DTensor, refuse_foreign
from hp_optim.newton_schulz import Orthogonalization
from hp_optim.ownership import OwnerPlan, Placed, assign
from hp_optim.rules import Matrix
from hp_optim.torch.agreement import check_planned
from hp_optim.world import own_rank, placed_as, world_of
from hp_platform import get_platform

__all__ = ["is_distributed", "layout_of", "local_device", "placed_on", "plan_for"]


def placed_on(parameter: torch.Tensor, name: str, matrices: tuple[Matrix, ...], settings: Orthogonalization) -> Placed:
    """Describe a parameter, plain or a DTensor, to the planner; see `hp_optim.world.placed_as`.

    Raises:
        TypeError: a DTensor of torch's own.
        ValueError: a partial parameter.
    """
    refuse_foreign(parameter, f"Muon: parameter {name!r}")
    return placed_as(name, parameter.shape, layout_of(parameter), matrices, settings)


def plan_for(placed: Sequence[Placed], parameters: Sequence[torch.Tensor]) -> tuple[OwnerPlan, torch.device]:
    """Return the owners, and the device on which matrices are exchanged and computed; all ranks call it together.

    Args:
        placed: see `placed_on`.
        parameters: those that are placed so.

    Raises:
        ValueError: the parameters' meshes are parts of different meshes; or a rank can't tell which part of a parameter
            another has, on all ranks.
    """
    meshes = {parameter._spec.mesh for parameter in parameters if isinstance(parameter, DTensor)}
    device = local_device(parameters[0])
    if device.type == "cpu" and any(mesh.device_type != "cpu" for mesh in meshes):
        device = torch.device(get_platform().devices.current_device())  # offloaded: computed where ranks communicate
    world, plan, failure = world_of(meshes) or [own_rank()], None, None
    try:
        plan = assign(placed, world)
    except ValueError as error:
        failure = ValueError(
            f"Muon: a layout is not the same on all ranks: {error}. Where fully_shard cuts tensor parallel parts of"
            " different sizes, make the features divide by the ranks, or shard by shard_placement_fn"
        )
    check_planned(failure, world, device)
    assert plan is not None
    return plan, device


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
