"""Moved values that are kept for the next operation that reads them so.

Note [One sum for q, k and v]
A value that several operations read as varying must be summed once, not once an operation, and one that they read
gathered is gathered once. What it became hangs on the value itself, found by layout and version, until its backward. A
node does not hold its result, so this is no cycle; for a leaf, which its node does hold, it would be one.

Only of a value inside a graph is anything kept: autograd itself takes such a value to be what it was where its version
counter says so. Leaves, and values without gradients, are written past their counters (``data``, ``to_local().data``,
an array of numpy's on the same memory), which nothing shows: they are moved at each read. So is a value whose memory
was handed out by ``data`` or ``to_local``.
"""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import Any

import torch

from hp_dtensor.spec import TensorSpec

__all__ = ["HANDED_OUT", "drop", "hand_out", "recall", "recorded", "remember"]

_impl: Any = torch._C._disabled_torch_function_impl
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_leaf = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_grad_enabled = torch.is_grad_enabled
_NONE: Any = MappingProxyType({})
HANDED_OUT: Any = MappingProxyType({"handed out": None})
"""Stands for what is kept of a value that may be written where its version counter does not show it."""
_reads_of_plain: dict[int, tuple[Any, dict[Any, Any]]] = {}
"""What plain tensors became, by their id, with a weak reference to each."""


def _reads(x: Any) -> Any:
    """What is kept of ``x``, a DTensor or a plain tensor."""
    if hasattr(x, "_spec"):
        return x.__dict__.get("_reads", _NONE)
    return _reads_of_plain.get(id(x), (None, _NONE))[1]


def recall(x: Any, dst: TensorSpec, how: Any) -> Any:
    """What ``remember`` kept of ``x``, unless ``x`` or it was written to since; None where there is nothing.

    Args:
        x: a DTensor, or a plain tensor, that is recorded.
        dst: the layout to read it in.
        how: what else the moved value depends on.
    """
    entry = _reads(x).get((dst, how))
    if entry is None:
        return None
    made, version, after = entry
    return made if version == _impl(_version, (), (x,)) and after == _impl(_version, (), (made,)) else None


def remember(x: Any, dst: TensorSpec, how: Any, made: Any) -> Any:
    """Keeps ``made``, what ``x`` became in layout ``dst``, where that is sound: Note [One sum for q, k and v]."""
    kept = _reads(x)
    if kept is HANDED_OUT or _impl(_is_leaf, (), (x,)):
        return made
    if kept is _NONE:
        kept = {}
        if hasattr(x, "_spec"):
            x._reads = kept
        else:
            key = id(x)
            _reads_of_plain[key] = weakref.ref(x, lambda _: _reads_of_plain.pop(key, None)), kept
    kept[dst, how] = made, _impl(_version, (), (x,)), _impl(_version, (), (made,))
    return made


def drop(x: Any) -> None:
    """Lets go of what is kept of ``x``: its backward has come."""
    if x.__dict__.get("_reads") is not HANDED_OUT:
        x.__dict__.pop("_reads", None)
    _reads_of_plain.pop(id(x), None)


def recorded(x: Any) -> bool:
    """Whether ``x`` is a value inside a graph that is being recorded."""
    return _grad_enabled() and _impl(_requires_grad, (), (x,)) and not _impl(_is_leaf, (), (x,))


def hand_out(x: Any) -> None:
    """From now on nothing is kept of ``x``, which may be written where its version counter does not show it."""
    x.__dict__["_reads"] = HANDED_OUT
