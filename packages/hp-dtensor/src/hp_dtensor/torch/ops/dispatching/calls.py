"""Calls of torch functions: the functions of a name, the name of a function, the tensors among its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.torch.dtensor import DTensor

T = torch.Tensor
_OPERATORS: Any = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def functions_of(names: str) -> list[Any]:
    """Find the torch functions of these names, wherever torch has them."""
    internal: Any = torch._C
    places = (torch, T, F, torch.special, torch.linalg, torch.functional, internal._nn, internal._VariableFunctions)
    found = {getattr(place, name): None for name in names.split() for place in places if hasattr(place, name)}
    return [func for func in found if callable(func)]


def is_operator(func: Any) -> bool:
    """Tell whether ``func`` is an operator of ``torch.ops``, or all overloads of one."""
    return isinstance(func, _OPERATORS)


def name_of(func: Any) -> str:
    """Name a torch function, a method, an attribute's reader or an operator, for an error."""
    owner = getattr(func, "__self__", None)
    if isinstance(owner, GetSetDescriptorType):  # an attribute that is read or set
        return f"Tensor.{owner.__name__}" + ("" if func.__name__ == "__get__" else f".{func.__name__}")
    if isinstance(func, torch._ops.OpOverload):  # aten::add.Tensor
        return func._schema.name + ("." + func._overloadname if func._overloadname != "default" else "")
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)


def on_meta(value: Any) -> Any:
    """Return an argument for a call that tells the results' shapes: of a DTensor an empty one on the meta device."""
    if isinstance(value, DTensor):
        return torch.empty(value._spec.shape, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def tensors_of(args: Any, kwargs: Any) -> Iterator[T]:
    """List the tensors among the arguments of a call, those in lists too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, T):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value, {})
