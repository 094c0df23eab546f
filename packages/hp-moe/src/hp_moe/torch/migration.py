"""Parameters of experts on the move: a parameter, its gradient and its optimizer states go to other ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hp_dtensor import DTensor, Placement
from hp_dtensor.torch.extend import local_view, wrap

T = torch.Tensor


def belongings(
    module: nn.Module, names: Sequence[str], cut: Placement, axes: int, optimizers: Sequence[Any]
) -> list[str]:
    """List what moves with parameters, the same on all ranks.

    Raises:
        NotImplementedError: something keeps them from moving.
    """
    moving = []
    for name in names:
        parameter, where = getattr(module, name), f"{type(module).__name__}.{name}"
        # fully_shard registers parameters of its own; it gives the module the method, and the parameter an axis more.
        if hasattr(module, "unshard") or parameter.device_mesh.ndim != axes or parameter.placements[0] != cut:
            raise NotImplementedError(
                f"{where} is placed {parameter.placements} on {parameter.device_mesh}. Experts move where their style"
                " alone has placed them: place them before fully_shard(..., shard_placement_fn=lambda each: Shard(1))"
            )
        if optimizers and parameter.requires_grad and not any(parameter is each for each in _parameters(optimizers)):
            raise NotImplementedError(
                f"{where} is a parameter of none of the optimizers that were passed, whose states have to move with it"
            )
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, T) and value.numel() > 1 and not _as(value, parameter):
                    raise NotImplementedError(
                        f"{type(optimizer).__name__}'s state {key!r} of {where} is not laid out as the parameter, so it"
                        " is not known which part is whose: experts cannot move under this optimizer"
                    )
        moving += [name] + ["grad"] * (parameter.grad is not None) + [key for key, _ in _states(parameter, optimizers)]
    return moving


def _parameters(optimizers: Sequence[Any]) -> Iterator[T]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _as(value: T, parameter: DTensor) -> bool:
    """Tell whether a state is on the device, in the layout of its parameter."""
    if not isinstance(value, DTensor) or value._spec is not parameter._spec:
        return False
    return local_view(value).untyped_storage().size() > 0 or local_view(value).numel() == 0


def _states(parameter: DTensor, optimizers: Sequence[Any]) -> Iterator[tuple[str, DTensor]]:
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, DTensor) and value.numel() > 1:
                yield key, value


@torch.no_grad()
def move(module: nn.Module, names: Sequence[str], cut: Placement, optimizers: Sequence[Any]) -> None:
    """Lay parameters out by ``cut`` on their first mesh axis, in the memory that they have."""
    for name in names:
        parameter = getattr(module, name)
        placements = (cut, *parameter.placements[1:])
        states, gradient = [value for _, value in _states(parameter, optimizers)], parameter.grad
        parameter.grad = None
        for tensor in (parameter, *states):
            _relaid(tensor, placements)
        if gradient is not None:
            _relaid(gradient, placements)
            parameter.grad = gradient


def _relaid(tensor: DTensor, placements: Sequence[Placement]) -> None:
    """Change a tensor's layout, not its memory: what else refers to that sees the new values."""
    source: Any = tensor.detach()
    moved = source.redistribute(placements=placements)
    local = local_view(tensor).detach()
    local.copy_(local_view(moved))
    tensor.data = wrap(local, moved._spec)
