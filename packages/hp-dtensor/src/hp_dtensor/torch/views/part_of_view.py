"""Local tensors of views that had to be redistributed: they may be read while the source is unchanged.

Note [The local tensor of a view that moved]
``to_local()`` exposes the memory of a DTensor, but for a view that moved (Note [A view that moved] in `moved_view`)
that memory is a copy. Ranks may compute different things with local tensors, so nothing may be communicated there: a
write cannot be sent to the source, and the source's new values cannot be fetched. Such a local tensor is of a class of
its own, which refuses both, on each rank by itself. A DTensor created from it is again a view of the source.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from hp_dtensor.torch.ops.dispatching.calls import writes_first
from hp_dtensor.torch.views.strides import storage_of
from hp_platform.extend import list_leaves

_impl: Any = torch._C._disabled_torch_function_impl
T = torch.Tensor
_version = T._version.__get__  # type: ignore[attr-defined]
_ASKING = frozenset("__get__ __hash__ __len__ size dim numel stride is_contiguous element_size".split())
"""Functions that read no value."""


class PartOfView(torch.Tensor):
    """The local tensor of a view that moved."""

    _view: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = args[:1] if writes_first(func) or kwargs.get("inplace") else ()
        for part in _parts([written, kwargs.get("out")]):
            if func is not T.requires_grad_:
                raise RuntimeError(
                    f"{name}: {_shown(part)}. It is a copy, and a write to it can't reach the DTensor of which it is a"
                    " view; write to the view itself, before to_local(), or clone() the local tensor"
                )
        parts = list(_parts([args, kwargs]))
        for part in parts:
            if name not in _ASKING and _is_stale(part._view):
                raise RuntimeError(
                    f"{name}: {_shown(part)}, and the DTensor of which it is a view was written to since; call"
                    " to_local() of the view again, or clone() the local tensor before the write"
                )
        if any(kind is not PartOfView and kind.__torch_function__ is not _impl for kind in types):
            # A DTensor treats plain tensors as replicated, or refuses them.
            return func(*_plain(args), **_plain(kwargs))
        out = _impl(func, types, args, kwargs)
        for result in list_leaves(out):
            for part in parts:
                if type(result) is T and storage_of(result)._cdata == storage_of(part)._cdata:
                    part_of(part._view, result)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(_impl(T.view_as, (), (self, self)), memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        return _impl(T.view_as, (), (self, self)).__reduce_ex__(proto)


def part_of(view: Any, part: torch.Tensor) -> PartOfView:
    """Turn ``part`` itself into the local tensor of a view.

    Args:
        view: the view that moved.
        part: a plain tensor on its memory.
    """
    result: Any = part
    result.__class__ = PartOfView
    result._view = view
    return result


def _is_stale(view: Any) -> bool:
    """Tell whether the source of ``view`` is stale itself, or was written to since the view was taken."""
    link = view.__dict__.get("_link")
    if link is None:
        return False
    if link.take is None:  # it shares the memory of its source
        return _is_stale(link.source)
    if storage_of(link.source)._cdata != link.storage._cdata:  # the view stays on the old storage
        return False
    counted = link.version is not None and link.version != _impl(_version, (), (link.source,))
    return counted or _is_stale(link.source)


def whole_of(part: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return the view whose local tensor is ``part``, None for any other tensor; and ``part`` as a plain tensor."""
    return (part._view, _plain(part)) if type(part) is PartOfView else (None, part)


def _shown(part: Any) -> str:
    return f"the local tensor of shape {tuple(_impl(T.size, (), (part,)))} is of a view that had to be redistributed"


def _plain(value: Any) -> Any:
    if type(value) is PartOfView:
        return _impl(T.view_as, (), (value, value))
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {name: _plain(item) for name, item in value.items()} if type(value) is dict else value


def _parts(value: Any) -> Iterator[PartOfView]:
    return (each for each in list_leaves(value) if type(each) is PartOfView)
