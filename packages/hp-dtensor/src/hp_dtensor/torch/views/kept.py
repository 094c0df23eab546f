"""Redistributed values, stored for the next operation that reads them.

Note [One sum for q, k and v]
The gradient of a value that several operations read as varying must be reduced once, not once per operation, and a
value that several operations read gathered is gathered once. The result is stored on the value itself, by layout and
version, until its backward. This is not a reference cycle: a node does not hold its result, and the stored value is not
a view. A leaf is held by its node, so nothing is stored for leaves. A DTensor that readers share (an input of parallel
modules) holds its source; the last four of those are stored.

Values are stored only for tensors inside a graph, for which autograd itself relies on the version counter. Leaves, and
tensors without gradients, may be written without a change of the counter (``data``, ``to_local().data``, a numpy array
on the same memory), so they are redistributed at each read, and so is a tensor whose memory ``data`` or ``to_local``
exposed.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from hp_dtensor.layout.spec import TensorSpec
from hp_platform.torch.internals import get_is_leaf, get_requires_grad, get_version, plainly

_NONE: Any = MappingProxyType({})
HANDED_OUT: Any = MappingProxyType({"handed out": None})
"""Marks a tensor that may be written without a change of its version counter: nothing is stored for it."""
_shared: list[tuple[Any, ...]] = []
_MOST_SHARED = 4


def recall(x: Any, dst: TensorSpec, vary: Any) -> Any:
    """Return what ``remember`` stored for ``x``, or None if there is nothing or ``x`` was written to since.

    Args:
        x: a DTensor inside a graph.
        dst: the layout in which to read it.
        vary: the axes on which the result of the reading operation varies.
    """
    entry = x.__dict__.get("_reads", _NONE).get((dst, vary))
    if entry is None:
        return None
    value, version, after = entry
    return value if version == plainly(get_version, (), (x,)) and after == plainly(get_version, (), (value,)) else None


def remember(x: Any, dst: TensorSpec, vary: Any, value: Any) -> Any:
    """Store ``value``, which is ``x`` in layout ``dst``, where that is sound: Note [One sum for q, k and v]."""
    stored = x.__dict__.get("_reads")
    if stored is HANDED_OUT or plainly(get_is_leaf, (), (x,)):
        return value
    if stored is None:
        stored = x._reads = {}
    stored[dst, vary] = value, plainly(get_version, (), (x,)), plainly(get_version, (), (value,))
    return value


def recall_shared(x: torch.Tensor, dst: TensorSpec, src: TensorSpec | None) -> Any:
    """Return what ``remember_shared`` stored for ``x``, or None if there is nothing or either was written to since."""
    if not _is_recorded(x):
        return None
    version = plainly(get_version, (), (x,))
    for source, layout, from_layout, value, then, after in _shared:
        if source is x and layout is dst and from_layout is src and then == version:
            if after == plainly(get_version, (), (value,)):
                return value
    return None


def remember_shared(x: torch.Tensor, dst: TensorSpec, src: TensorSpec | None, value: Any) -> Any:
    """Store ``value``, the DTensor in layout ``dst`` of ``x``, a DTensor or a plain local tensor of layout ``src``."""
    if _is_recorded(x) and x.__dict__.get("_reads") is not HANDED_OUT:
        _shared.insert(0, (x, dst, src, value, plainly(get_version, (), (x,)), plainly(get_version, (), (value,))))
        del _shared[_MOST_SHARED:]
    return value


def drop(x: Any) -> None:
    """Drop the values stored for ``x``, whose backward has begun, and all shared ones."""
    _shared.clear()
    if x is not None and x.__dict__.get("_reads") is not HANDED_OUT:
        x.__dict__.pop("_reads", None)


def stop_keeping(x: Any) -> None:
    """Store nothing for ``x`` from now on: it may be written without a change of its version counter."""
    x.__dict__["_reads"] = HANDED_OUT


def _is_recorded(x: Any) -> bool:
    """Tell whether ``x`` is inside a graph that is being recorded."""
    return torch.is_grad_enabled() and plainly(get_requires_grad, (), (x,)) and not plainly(get_is_leaf, (), (x,))
