"""Model states: whole or sharded, out of a model and into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hp_dtensor.torch.extend import local_view, wrap
from hp_fsdp.state_dicts import load_model_state, model_state
from hp_fsdp.state_options import StateDictOptions
from hp_fsdp.torch.loading import unwrapped
from hp_fsdp.torch.module import group_of
from hp_fsdp.torch.whole import fill, spec_of, transport, whole, wire

__all__ = [
    "communication_device",
    "exported",
    "full_state_dict",
    "get_model_state_dict",
    "load_full_state_dict",
    "parameter_names",
    "set_model_state_dict",
]


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """The model's state, by the names of the unsharded model.

    Sharded (the default), parameters are DTensors of the memory that the model uses: `torch.distributed.checkpoint`
    saves it, and loads into it in place. Full, they are whole plain tensors; every rank has to call it, one parameter
    is gathered at a time. Tied parameters appear under each name, as one tensor.

    Example:
        >>> torch.distributed.checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=path)

    Args:
        model: holds sharded modules, is one, or is not sharded.
        options: see `StateDictOptions`.
    """
    options = StateDictOptions.of(options)
    return _state(model, options, rank0_only=options.full_state_dict and options.cpu_offload)


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Loads a state into the model in place: whole tensors, of which each rank takes its part, or DTensors.

    Example:
        >>> state = torch.load(path, mmap=True) if rank == 0 else {}
        >>> options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        >>> set_model_state_dict(model, state, options=options)

    Args:
        model: with memory, not on the meta device.
        model_state_dict: by the names of the unsharded model. DTensors in another layout of the same ranks are moved;
            a state that another number of ranks saved is loaded by ``torch.distributed.checkpoint.load``.
        options: see `StateDictOptions`.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, both empty where ``strict``.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
        TypeError: what is no tensor but should be one.
        RuntimeError: a parameter on the meta device.
    """
    options = StateDictOptions.of(options)
    own = _entries(model)
    extra = {}

    def load(name: str, value: Any) -> None:
        if isinstance(own[name], torch.Tensor):
            fill(name, own[name], value)
        else:
            extra[name] = value

    told = wire(communication_device(model))
    missing, unknown = load_model_state(own, _frozen(model), model_state_dict, options, load, told)
    if extra:  # a module's extra state is no tensor, and its own to set
        wrapped = {unwrapped(name): name for name in model.state_dict(keep_vars=True)}
        model.load_state_dict({wrapped[name]: value for name, value in extra.items()}, strict=False)
    return _IncompatibleKeys(missing, unknown)


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool = False) -> dict[str, Any]:
    """The model's state as whole plain tensors: `get_model_state_dict` with ``full_state_dict=True``.

    Args:
        model: holds sharded modules, or is one.
        rank0_only: other ranks than the first take part and get an empty dictionary. Default False: all get the same.
        cpu: put the tensors on the host.
    """
    return _state(model, StateDictOptions(full_state_dict=True, cpu_offload=cpu), rank0_only=rank0_only)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Loads whole tensors, the same on every rank: `set_model_state_dict`. Nothing is communicated.

    Args:
        model: holds sharded modules, or is one.
        state: what ``full_state_dict`` gave, or an unsharded model's ``state_dict()``; the same on every rank.
        strict: every name must be in both. Default True.

    Raises:
        ValueError: with ``strict``, names that are missing or not known; a tensor of another shape.
    """
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=strict))


def exported(value: Any, options: StateDictOptions, keep: bool) -> Any:
    """A value of a state dict as ``options`` say; what is no tensor as it is.

    Args:
        value: a DTensor is gathered where the options ask for it, so every rank has to call it.
        options: whole or not, on the host or not.
        keep: False drops the whole tensor and gives None.
    """
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        if options.full_state_dict:
            made = whole(value)
            return (made.cpu() if options.cpu_offload else made) if keep else None
        spec = spec_of(value)
        local = local_view(value)
        if options.cpu_offload:
            local = local.to("cpu", copy=True)
        return local if spec is None else wrap(local, spec)


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """The names of each sharded parameter, by its id: more than one where it is tied."""
    _settle(model)
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(unwrapped(name))
    return found


def communication_device(model: nn.Module) -> torch.device:
    """The device on which the ranks that share the model communicate."""
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec is not None:
            return transport(spec.mesh)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _state(model: nn.Module, options: StateDictOptions, *, rank0_only: bool) -> dict[str, Any]:
    return model_state(_entries(model), _frozen(model), options, exported, rank0_only=rank0_only)


def _entries(model: nn.Module) -> dict[str, Any]:
    """What ``model.state_dict()`` holds, the very tensors, by unwrapped names."""
    for module in model.modules():
        if hasattr(module, "_fqn_modifiers"):
            raise NotImplementedError(
                f"{type(module).__name__} renames its keys by a method _fqn_modifiers, which is not supported here;"
                " remove the method and rename the state's keys yourself"
            )
    _settle(model)
    return {unwrapped(name): value for name, value in model.state_dict(keep_vars=True).items()}


def _frozen(model: nn.Module) -> list[str]:
    named = model.named_parameters(remove_duplicate=False)
    return [unwrapped(name) for name, parameter in named if not parameter.requires_grad]


def _settle(model: nn.Module) -> None:
    """Registers the sharded parameters under ``model``, in their flat shards."""
    for module in model.modules():
        group = group_of(module)
        if group is not None:
            group.reshard()
            group.check()
