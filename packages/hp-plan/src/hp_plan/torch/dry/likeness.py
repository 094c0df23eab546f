"""Results of operators on the meta device, remembered by what they depend on.

Note [Operators are played once]
On the meta device many operators compute their result's shape in Python, for a third of a millisecond. A step calls the
same few hundred with alike tensors again and again: for each block, each micro-batch and each step. What an operator
makes of tensors without memory depends on their shapes, strides and dtypes alone, so its result is made anew from what
the first call has returned. Views, operators that change a tensor's shape or storage, and those whose result shares
memory with an argument are called each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hp_platform.extend import list_leaves

T = torch.Tensor
Key = tuple[Any, ...]
_CHANGES_STORAGE = {"aten::resize_", "aten::set_", "aten::resize_as_", "aten::_unsafe_view"}
_NEW, _CHANGED = "new", "changed"


class Results:
    """What operators have returned."""

    def __init__(self) -> None:
        self._kinds: dict[Any, str] = {}
        self._known: dict[Key, Any] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator returns for meta tensors.

        Args:
            func: the operator.
            args: its arguments by place.
            kwargs: by name.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        key = _key(func, args, kwargs) if kind else None
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            return known(args)
        out = func(*args, **kwargs)
        again = _again(out, args) if kind == _NEW else _same(out, args)
        if again is not None:
            self._known[key] = again
        return out


def _kind(func: Any) -> str:
    """Tell whether an operator makes new tensors, changes its first argument, or does anything else ("")."""
    schema = func._schema
    if func.namespace != "aten" or schema.name in _CHANGES_STORAGE or torch.Tag.inplace_view in func.tags:
        return ""
    aliased = [each.alias_info is not None for each in schema.returns]
    if not schema.is_mutable:
        return "" if any(aliased) or not aliased else _NEW
    first = schema.arguments[0]
    writes = [each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return _CHANGED if first in writes and (not aliased or aliased == [True]) else ""


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """Return what the result depends on; None where it depends on more."""
    try:
        key = (func, *map(_likeness, args), *((name, _likeness(each)) for name, each in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _likeness(value: Any) -> Any:
    if isinstance(value, T):
        if not value.is_meta:
            raise TypeError("a tensor of the host has values")
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_likeness, value))
    return type(value), value


def _again(out: Any, args: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """Return a function that makes tensors like the result's; None where it is not of new meta tensors alone."""
    results = (out,) if isinstance(out, T) else out
    if not isinstance(results, (tuple, list)) or not all(isinstance(each, T) and each.is_meta for each in results):
        return None
    given = {each.untyped_storage()._cdata for each in list_leaves(args) if isinstance(each, T)}
    if any(each.untyped_storage()._cdata in given or each.storage_offset() for each in results):
        return None
    likenesses = [(tuple(each.shape), each.stride(), each.dtype) for each in results]
    kind = None if isinstance(out, T) else type(out)

    def make(args: Sequence[Any]) -> Any:
        made = [torch.empty_strided(size, steps, dtype=dtype, device="meta") for size, steps, dtype in likenesses]
        return made[0] if kind is None else kind(made)

    return make


def _same(out: Any, args: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """Return a function that returns the first argument, or nothing, as the operator does."""
    if out is None:
        return lambda args: None
    return (lambda args: args[0]) if out is args[0] else None
