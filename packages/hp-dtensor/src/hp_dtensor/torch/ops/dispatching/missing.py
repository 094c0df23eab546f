"""What to say of a function that has no sharding rule: three lines that give it one."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.torch.ops.dispatching.calls import on_meta
from hp_platform.extend import map_nested

T = torch.Tensor


def advice(func: Any, args: Any, kwargs: Any) -> str:
    """Lines to copy that register a rule for ``func``, right for every function: all operands replicated.

    Args:
        func: the torch function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if writes(func):
        return "Use the function that returns its result, or gather the operands first with full_tensor()."
    operands = ["Replicate()" if tensor else "None" for value in (*args, *kwargs.values()) for tensor in _kinds(value)]
    results = ", ".join(["Replicate()"] * _results(func, args, kwargs))
    return (
        "Give it one (from hp_dtensor import Replicate, register_sharding); this one is right for every function, add"
        " pairs for the placements that it can keep:\n\n"
        f"    @register_sharding({_path(func)})\n"
        "    def _(*args, **kwargs):\n"
        f"        return [([{results}], [{', '.join(operands)}])]\n\n"
        "Or gather the operands first with full_tensor()."
    )


def writes(func: Any) -> bool:
    """Tell whether a function writes to its arguments, by its schema or its name."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def writes_first(func: Any) -> bool:
    """Tell whether ``func`` writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)


_NOT_IN_PLACE = ("__index__", "__int__", "__invert__")


def _kinds(value: Any) -> list[bool]:
    """For an argument, or each item of a list of tensors, whether it is a tensor."""
    listed = isinstance(value, (list, tuple)) and any(isinstance(item, T) for item in value)
    return [isinstance(item, T) for item in (value if listed else [value])]


def _results(func: Any, args: Any, kwargs: Any) -> int:
    """How many tensors the function returns, found on meta; one where that does not tell."""
    try:
        with torch.no_grad():
            result = func(*map_nested(on_meta, args), **{name: map_nested(on_meta, v) for name, v in kwargs.items()})
    except Exception:  # whatever a kernel without meta raises
        return 1
    listed = result if isinstance(result, (list, tuple)) else [result]
    return max(sum(isinstance(value, T) for value in listed), 1)


def _path(func: Any) -> str:
    """Where a user finds the function."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{func}"
    name = getattr(func, "__name__", "")
    for path, place in (
        ("torch", torch),
        ("torch.Tensor", T),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.linalg", torch.linalg),
        ("torch.special", torch.special),
        ("torch.fft", torch.fft),
    ):
        if name and getattr(place, name, None) is func:
            return f"{path}.{name}"
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module and name else repr(func)
