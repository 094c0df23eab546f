"""Building a module without memory, and filling in only the local parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hp_dtensor.torch.dtensor import DTensor, local_view, wrap

__all__ = ["init_empty_weights", "init_on_device", "init_parameters"]


@contextlib.contextmanager
def init_on_device(device: torch.device | str) -> Iterator[None]:
    """Modules built inside have their parameters and buffers on ``device``."""
    with torch.device(device):
        yield


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules built inside are on meta: shapes without memory. Shard them, then ``init_parameters``.

    Example:
        >>> with init_empty_weights():
        ...     model = Model()
        >>> parallelize_module(model, mesh, plan)
        >>> init_parameters(model)
    """
    with init_on_device("meta"):
        yield


def init_parameters(module: torch.nn.Module, *, device: torch.device | str | None = None) -> torch.nn.Module:
    """Gives a module that was built on meta memory for its local parts, and its initial values.

    The values are those that the module would have had, built whole with the same seed: every submodule's
    ``reset_parameters`` runs in the order of construction (inner modules first), then a ``transformers`` model's own
    ``init_weights``; random numbers are drawn for the whole tensor, see Note [One stream for all layouts].

    Args:
        module: the module; parameters that hold memory already are initialised again with the rest.
        device: where to put plain meta parameters; default the device type of the DTensors, else the accelerator or
            CPU.

    Raises:
        RuntimeError: a submodule holds parameters on meta but has no ``reset_parameters``, and no parent initialises
            it.
    """
    target = torch.device(device) if device is not None else _device_of(module)
    made: dict[int, Any] = {}
    was_meta = {name for name, tensor in _named(module) if tensor.is_meta}
    for child in module.modules():
        materialize = getattr(child, "_materialize", None)
        if callable(materialize):
            materialize(target)
    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _empty(tensor, target)
                    store[name] = made[id(tensor)]
    own = getattr(module, "init_weights", None)
    filled: set[int] = set()
    for child in _inner_first(module):
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if callable(reset):
            reset()
            filled.update(id(child_) for child_ in child.modules())
    if callable(own):
        for child in module.modules():
            if hasattr(child, "_is_hf_initialized"):
                child._is_hf_initialized = False  # type: ignore[assignment]
        own()
    else:
        for name, child in module.named_modules():
            held = [f"{name}.{n}".lstrip(".") for n in (*child._parameters, *child._buffers)]
            empty = [n for n in held if n in was_meta]
            if empty and id(child) not in filled:
                raise RuntimeError(
                    f"init_parameters: {type(child).__name__} ({name or 'the module itself'}) holds {empty} on meta and"
                    " has no reset_parameters() to give them values; add one, or build the module outside"
                    " init_empty_weights()"
                )
    return module


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _device_of(module: torch.nn.Module) -> torch.device:
    for _, tensor in _named(module):
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
        if not tensor.is_meta:
            return tensor.device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    local = torch.empty_like(local_view(tensor), device=device)
    made = wrap(local, tensor._spec) if isinstance(tensor, DTensor) else local
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(
            {k: v for k, v in tensor.__dict__.items() if k not in ("_spec", "_moved_from", "_is_hf_initialized")}
        )
    return made


def _inner_first(module: torch.nn.Module, seen: set[int] | None = None) -> Iterator[torch.nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module
