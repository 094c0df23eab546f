"""Views that had to be moved inside of a region that `torch.compile` traces: copies, which may be read.

Note [A view that moved in a graph]
    Outside of graphs such a view follows its source (Note [A view that moved] in `moved_view`). A graph has plain local
    tensors and nothing that would follow, so there it is of a class of its own. What would write to it is refused, and
    so is what reads it after a write that may have been to its source: one of the same dtype to a DTensor with no more
    elements than the source. Leaving the region it stays of that class, and stays a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.missing import writes_first
from hp_dtensor.torch.views.moved_view import VIEWS

__all__ = ["CopiedView", "REFUSED"]

REFUSED = (
    "torch.compile: a view of a DTensor along a dim that is cut had to be moved, so that inside of a compiled region it"
    " is a copy"
)


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    written = [*args[:1], kwargs.get("out")] if writes_first(func) else [kwargs.get("out")]
    if any(type(x) is CopiedView for x in _listed(written)):
        raise RuntimeError(f"{REFUSED}: {func.__name__} would not reach what it is a view of; clone() it first")
    copies: list[Any] = [x for x in _listed((args, kwargs)) if type(x) is CopiedView]
    for x in copies:
        x.__class__ = DTensor
    try:
        out = func(*args, **kwargs)
    finally:
        for x in copies:
            x.__class__ = CopiedView
    if func in VIEWS:
        for x in _listed(out):
            if type(x) is DTensor:
                x.__class__ = CopiedView
    return out


class CopiedView(DTensor):
    """A DTensor that is a copy of what it is a view of; see Note [A view that moved in a graph]."""

    _taken: Any  # see `hp_dtensor.torch.compile.graph.taken`
    __torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]


def _listed(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _listed(each)
    elif isinstance(value, dict):
        yield from _listed(list(value.values()))
