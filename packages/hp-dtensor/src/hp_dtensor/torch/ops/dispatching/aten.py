"""``torch.ops.aten`` operators called on DTensors: each is the public function that torch makes of it.

torch generates its functions and methods from the operators' own schemas, so the arguments are the same ones. A few
operators have no such function; the table here says what they are. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.torch.ops.dispatching.calls import name_of

T = torch.Tensor
_internal: Any = torch._C
_PLACES = (torch._VF, _internal._nn, _internal._linalg, _internal._special, _internal._fft, T)  # type: ignore[attr-defined]


def call(operator: Any, intercepted: Callable[[Any], bool]) -> Callable[..., Any] | None:
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
