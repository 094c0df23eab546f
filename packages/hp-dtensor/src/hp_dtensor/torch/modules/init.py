"""Building a module without memory, and initializing only the local tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hp_dtensor.functions.modes import implicit_replication
from hp_dtensor.torch.dtensor import _OWN as OWN
from hp_dtensor.torch.dtensor import DTensor, local_view, wrap


@contextlib.contextmanager
def init_on_device(device: torch.device | str) -> Iterator[None]:
    """Create the parameters and buffers of modules built inside on ``device``."""
    with torch.device(device):
        yield


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """Build modules on meta, without memory. Shard them, then call ``init_parameters``.

    Example:
        >>> with init_empty_weights():
        ...     model = Model()
        >>> parallelize_module(model, mesh, plan)
        >>> init_parameters(model)
    """
    with init_on_device("meta"):
        yield


def init_parameters(module: torch.nn.Module, *, device: torch.device | str | None = None) -> torch.nn.Module:
    """Give a module that was built on meta memory for its local tensors, and its initial values.

    The values are those of the undistributed module, built with the same seed: every submodule's ``reset_parameters``
    runs in the order of construction (inner modules first), then a ``transformers`` model's own ``init_weights``;
    random numbers are drawn for the global tensor, see Note [One stream for all layouts].

    A parameter that several modules share gets the values of the first.

    Args:
        module: the module; parameters that have memory already are initialized again with the rest.
        device: the device of plain meta parameters; default the device type of the DTensors, otherwise the accelerator
            or CPU.

    Raises:
        RuntimeError: a submodule has parameters on meta but no ``reset_parameters``, and no parent initializes it.
    """
    _check_initializers(module)
    materialize(module, torch.device(device) if device is not None else _device_of(module))
    for child in module.modules():
        if hasattr(child, "_is_hf_initialized"):
            child._is_hf_initialized = False  # type: ignore[assignment]
    ties = _untie(module)
    with implicit_replication():  # what they compute beside is whole, and the same on all ranks
        for child in _inner_first(module):
            for initialize in _initializers(child):
                initialize()
    for store, name, tensor in ties:
        store[name] = tensor
    return module


def materialize(module: torch.nn.Module, target: torch.device) -> None:
    """Give a module that was built on meta memory for its local tensors, whose values are not set.

    Args:
        module: the module; what has memory already keeps it. Parameters stay the same objects, buffers don't.
        target: the device.
    """
    for child in module.modules():
        own = getattr(child, "_materialize", None)
        if callable(own):
            own(target)
    replaced: dict[int, tuple[torch.Tensor, Any]] = {}  # by identity; holds the old ones, so that ids stay theirs
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    if store is child._parameters:
                        give_memory(tensor, torch.empty_like(local_view(tensor), device=target))
                        continue
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = tensor, _empty(tensor, target)
                    store[name] = replaced[id(tensor)][1]


def give_memory(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Give a parameter, which stays the same object, memory on another kind of device than it had (meta).

    Args:
        parameter: a leaf, plain or a DTensor.
        local: a tensor of its local shape and dtype, whose memory the parameter takes.
    """
    trains = parameter.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        hooks, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        torch._C._swap_tensor_impl(parameter, local.detach().requires_grad_(trains))
        # the swap exchanged them, too
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, accumulated  # type: ignore[attr-defined]
    for name in OWN - {"_spec", "_meets_plain", "_outside_graphs"} | {"_is_hf_initialized"}:
        vars(parameter).pop(name, None)


def _untie(module: torch.nn.Module) -> list[tuple[Any, str, torch.Tensor]]:
    """Give all but the first holder of a parameter one of its own, to be drawn and dropped as constructors do."""
    ties, seen = [], set()
    for child in module.modules():
        for name, tensor in child._parameters.items():
            if tensor is not None and id(tensor) in seen:
                ties.append((child._parameters, name, tensor))
                child._parameters[name] = _empty(tensor, tensor.device)
            seen.add(id(tensor))
    return ties


def _initializers(module: torch.nn.Module) -> list[Any]:
    """Return what initializes a module as its constructor does; transformers models call ``init_weights`` in theirs."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    own = getattr(module, "init_weights", None)
    return [one for one in (reset, own) if callable(one)]


def _check_initializers(module: torch.nn.Module) -> None:
    filled = {id(inner) for child in module.modules() if _initializers(child) for inner in child.modules()}
    for name, child in module.named_modules():
        tensors = {**child._parameters, **child._buffers}
        empty = [key for key, tensor in tensors.items() if tensor is not None and tensor.is_meta]
        if empty and id(child) not in filled:
            raise RuntimeError(
                f"init_parameters: {type(child).__name__} ({name or 'the module itself'}) holds {empty} on meta and"
                " has no reset_parameters() to give them values; add one, or build the module outside"
                " init_empty_weights()"
            )


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _device_of(module: torch.nn.Module) -> torch.device:
    for _, tensor in _named(module):
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
        if not tensor.is_meta:
            return tensor.device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def _empty(tensor: torch.Tensor, device: torch.device) -> Any:
    local = torch.empty_like(local_view(tensor), device=device)
    empty = wrap(local, tensor._spec) if isinstance(tensor, DTensor) else local
    if isinstance(tensor, torch.nn.Parameter):
        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        vars(empty).update(
            {k: v for k, v in tensor.__dict__.items() if k not in ("_spec", "_moved_from", "_is_hf_initialized")}
        )
    return empty


def _inner_first(module: torch.nn.Module, seen: set[int] | None = None) -> Iterator[torch.nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module
