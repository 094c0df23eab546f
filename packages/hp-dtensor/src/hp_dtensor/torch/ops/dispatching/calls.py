"""Calls of torch functions: names, tensors among the arguments, public functions of operators, missing rules.

An operator of ``torch.ops.aten`` is called as the public function that torch makes of it. torch generates its functions
and methods from the operators' own schemas, so the arguments are the same ones. A few operators have no such function;
the table here says what they are. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import GetSetDescriptorType
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.torch.dtensor import DTensor
from hp_platform.extend import map_nested
from hp_platform.torch.internals import (
    fft_functions,
    linalg_functions,
    nn_functions,
    special_functions,
    variable_functions,
)

T = torch.Tensor
_OPERATORS: Any = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def functions_of(names: str) -> list[Any]:
    """Find the torch functions of these names, wherever torch has them."""
    places = (torch, T, F, torch.special, torch.linalg, torch.functional, nn_functions, variable_functions)
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


_PLACES = (torch._VF, nn_functions, linalg_functions, special_functions, fft_functions, T)


def public_call(operator: Any, intercepted: Callable[[Any], bool]) -> Callable[..., Any] | None:
    """Return the intercepted function that is equivalent to an operator of aten; None if torch has none.

    Args:
        operator: the operator.
        intercepted: tells whether DTensors have a function.
    """
    space, _, name = name_of(operator).partition("::")
    if space != "aten":
        return None
    name = name.partition(".")[0]
    if name in _OTHERS:
        return _OTHERS[name]
    found = [getattr(place, name) for place in _PLACES if hasattr(place, name)]
    function = next((each for each in found if intercepted(each)), found[0] if found else None)
    if function is None:
        return None
    return lambda *args, **kwargs: function(*_self_first(args, kwargs), **kwargs)


def _self_first(args: Any, kwargs: Any) -> Any:
    """Pass the argument that a schema calls ``self`` by position: Python's functions call it ``input``."""
    return (kwargs.pop("self"), *args) if "self" in kwargs else args


# ---- operators that are no functions ----
def _to_copy(x: T, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **same: Any) -> T:
    named = {"dtype": dtype, "device": device, "memory_format": memory_format}
    options = {name: value for name, value in named.items() if value is not None}
    return x.to(**options, copy=True) if options else x.clone()


def _softmax(function: Any) -> Any:
    return lambda x, dim, half_to_float=False: function(x, dim, dtype=torch.float32 if half_to_float else None)


def _slice(x: T, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> T:
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _embedding(
    weight: T, indices: T, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> T:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


_OTHERS: dict[str, Callable[..., Any]] = {
    "_to_copy": _to_copy,
    "_softmax": _softmax(torch.softmax),
    "_log_softmax": _softmax(torch.log_softmax),
    "_unsafe_view": lambda x, size: x.reshape(size),
    "_local_scalar_dense": lambda x: x.item(),
    "embedding": _embedding,
    "lift_fresh": lambda x: x.view_as(x),
    "slice": _slice,
    "sym_size": lambda x, *dim: x.size(*dim),
    "sym_numel": lambda x: x.numel(),
    "sym_stride": lambda x, *dim: x.stride(*dim),
    "sym_storage_offset": lambda x: x.storage_offset(),
}


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
