"""The tensors of a module, for `hp_fsdp.state_dict`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hp_dtensor.torch.extend import local_view, wrap
from hp_fsdp.from_rank0 import Wire
from hp_fsdp.sharded_class import groups_in
from hp_fsdp.torch import whole
from hp_fsdp.torch.host import transport
from hp_fsdp.torch.loading import unwrapped
from hp_fsdp.torch.whole import fill, spec_of

__all__ = ["entries", "fill", "full", "incompatible_keys", "is_tensor", "load_extra", "parameters", "part", "wire"]

incompatible_keys = _IncompatibleKeys


def entries(model: nn.Module) -> dict[str, Any]:
    """Get the very objects that ``model.state_dict()`` holds, by unwrapped names."""
    for module in model.modules():
        if hasattr(module, "_fqn_modifiers"):
            raise NotImplementedError(
                f"{type(module).__name__} renames its keys by a method _fqn_modifiers, which is not supported here;"
                " remove the method and rename the state's keys yourself"
            )
    _settle(model)
    return {unwrapped(name): value for name, value in model.state_dict(keep_vars=True).items()}


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters by unwrapped names, under each name where one is tied."""
    _settle(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield unwrapped(name), parameter


def is_tensor(value: Any) -> bool:
    """Tell tensors from the rest of a state."""
    return isinstance(value, torch.Tensor)


@torch.no_grad()
def full(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    """Gather the full tensor, in memory of its own."""
    gathered = whole.whole(tensor)
    return gathered.cpu() if on_host else gathered


@torch.no_grad()
def part(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    """Get a tensor that looks into this rank's part, or a copy of it on the host."""
    spec, local = spec_of(tensor), local_view(tensor)
    if on_host:
        local = local.to("cpu", copy=True)
    return local if spec is None else wrap(local, spec)


def load_extra(model: nn.Module, extra: dict[str, Any]) -> None:
    """Hand modules the extra states that are no tensors."""
    wrapped = {unwrapped(name): name for name in model.state_dict(keep_vars=True)}
    model.load_state_dict({wrapped[name]: value for name, value in extra.items()}, strict=False)


def wire(model: nn.Module) -> Wire:
    """Get how rank 0 sends, over the device on which the ranks that share the model communicate."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    spec = next((spec for parameter in model.parameters() if (spec := spec_of(parameter)) is not None), None)
    return whole.wire(device if spec is None else transport(spec.mesh))


def _settle(model: nn.Module) -> None:
    """Registers the sharded parameters under ``model``, in their flat shards."""
    for group in groups_in(model.modules()):
        group.reshard()
        group.check()
