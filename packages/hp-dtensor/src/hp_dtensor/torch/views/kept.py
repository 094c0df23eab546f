"""Moved values that are kept for the next operation that reads them so.

Note [One sum for q, k and v]
A value that several operations read as varying must be summed once, not once an operation, and one that they read
gathered is gathered once. What it became hangs on the value itself, found by layout and version, until its backward. A
node does not hold its result, and what a value became is no view of it, so this is no cycle that nobody would collect.
A leaf is held by its node: of leaves nothing is kept. What readers share as a DTensor (the inputs of parallel modules)
holds what it came from: of those, the last four are kept.

Only of a value inside a graph is anything kept: autograd itself takes such a value to be what it was where its version
counter says so. Leaves, and values without gradients, are written past their counters (``data``, ``to_local().data``,
an array of numpy's on the same memory), which nothing shows: they are moved at each read. So is a value whose memory
was handed out by ``data`` or ``to_local``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from hp_dtensor.layout.spec import TensorSpec

__all__ = ["HANDED_OUT", "drop", "hand_out", "recall", "recall_shared", "remember", "remember_shared"]

_impl: Any = torch._C._disabled_torch_function_impl
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_leaf = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_NONE: Any = MappingProxyType({})
HANDED_OUT: Any = MappingProxyType({"handed out": None})
"""Stands for what is kept of a value that may be written where its version counter does not show it."""
_shared: list[tuple[Any, ...]] = []
_MOST_SHARED = 4


def recall(x: Any, dst: TensorSpec, vary: Any) -> Any:
    """Return what ``remember`` stored for ``x``, or None if there is nothing or ``x`` was written to since.

    Args:
        x: a DTensor, recorded.
        dst: the layout to read it in.
        vary: the axes where the result of the reading operation varies.
    """
    entry = x.__dict__.get("_reads", _NONE).get((dst, vary))
    if entry is None:
        return None
    value, version, after = entry
    return value if version == _impl(_version, (), (x,)) and after == _impl(_version, (), (value,)) else None


def remember(x: Any, dst: TensorSpec, vary: Any, value: Any) -> Any:
    """Store ``value``, which is ``x`` in layout ``dst``, where that is sound: Note [One sum for q, k and v]."""
    stored = x.__dict__.get("_reads")
    if stored is HANDED_OUT or _impl(_is_leaf, (), (x,)):
        return value
    if stored is None:
        stored = x._reads = {}
    stored[dst, vary] = value, _impl(_version, (), (x,)), _impl(_version, (), (value,))
    return value


def recall_shared(x: torch.Tensor, dst: TensorSpec, src: TensorSpec | None) -> Any:
    """Return what ``remember_shared`` stored for ``x``, or None if there is nothing or either was written to since."""
    if not _is_recorded(x):
        return None
    version = _impl(_version, (), (x,))
    for source, layout, from_layout, value, then, after in _shared:
        if source is x and layout is dst and from_layout is src and then == version:
            if after == _impl(_version, (), (value,)):
                return value
    return None


def remember_shared(x: torch.Tensor, dst: TensorSpec, src: TensorSpec | None, value: Any) -> Any:
    """Store ``value``, the DTensor in layout ``dst`` of ``x``, a DTensor or a plain local tensor of layout ``src``."""
    if _is_recorded(x) and x.__dict__.get("_reads") is not HANDED_OUT:
        _shared.insert(0, (x, dst, src, value, _impl(_version, (), (x,)), _impl(_version, (), (value,))))
        del _shared[_MOST_SHARED:]
    return value


def drop(x: Any) -> None:
    """Lets go of what is kept of ``x``, whose backward has come, and of what is shared."""
    _shared.clear()
    if x is not None and x.__dict__.get("_reads") is not HANDED_OUT:
        x.__dict__.pop("_reads", None)


def hand_out(x: Any) -> None:
    """From now on nothing is kept of ``x``, which may be written where its version counter does not show it."""
    x.__dict__["_reads"] = HANDED_OUT


def _is_recorded(x: Any) -> bool:
    """Whether ``x`` is a value inside a graph that is being recorded."""
    return torch.is_grad_enabled() and _impl(_requires_grad, (), (x,)) and not _impl(_is_leaf, (), (x,))
