"""What torch supplies to ``load_state_dict`` of a sharded module: see `hp_fsdp.loading`."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from hp_dtensor import DeviceMesh, Replicate
from hp_dtensor.torch.extend import DTensor, execute, local_view, wrap
from hp_fsdp.torch.host import transport
from hp_fsdp.torch.whole import spec_of
from hp_platform import collectives

__all__ = ["Tensor", "has_memory", "is_checked", "part", "somewhere", "unwrapped"]

Tensor = torch.Tensor
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What torch's wrappers of a module add to the names inside it."""


def unwrapped(name: str) -> str:
    """A name without what wrappers added to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_checked(target: torch.Tensor) -> bool:
    """Tell a parameter from buffers, of which some take other shapes, and from what is lazy."""
    return isinstance(target, torch.nn.Parameter) and not is_lazy(target)


def has_memory(target: torch.Tensor) -> bool:
    """Tell whether a tensor is not on the meta device."""
    return target.device.type != "meta"


def somewhere(mesh: DeviceMesh, here: bool) -> bool:
    """Tell whether a condition holds on any rank of a mesh; waits for all."""
    told = torch.tensor([int(here)], device=transport(mesh))
    for axis in range(mesh.ndim):
        collectives.all_reduce(told, "max", group=mesh.get_group(axis))
    return bool(told.item())


@torch.no_grad()
def part(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give this rank's part of a value, as the target is laid out, and with its layout."""
    spec = spec_of(target)
    if isinstance(value, DTensor):
        if spec is None:
            return value.full_tensor()
        return value if value._spec is spec else value.redistribute(spec.mesh, spec.placements)
    if spec is None:
        return value
    value = value.reshape(spec.shape) if not spec.shape else value
    if tuple(value.shape) != tuple(spec.shape):
        return wrap(local_view(value), spec)
    made = execute(value.detach(), spec.with_placements([Replicate()] * spec.mesh.ndim), spec)
    return wrap(local_view(made), spec)
