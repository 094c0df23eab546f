"""Global strides of DTensors, the same on all ranks: Note [Thin shards] in `hp_dtensor.layout.sharding`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hp_dtensor.layout.sharding import contiguous, global_strides
from hp_dtensor.torch.backward.compat import without_modes
from hp_platform.torch.internals import plainly, without_torch_function

T = torch.Tensor
"""Tells whether two tensors, or the local tensors of DTensors, share a storage."""


def local_strides(x: Any) -> tuple[int, ...]:
    """Return the strides of the local tensor."""
    return plainly(T.stride, (), (x,))


def strides_of(x: Any) -> tuple[int, ...]:
    """Return the strides of the DTensor ``x`` as a global tensor."""
    spec = x._spec
    if spec.thin or 0 in spec.local_shape:
        return x.__dict__.get("_strides") or contiguous(spec.shape)
    return global_strides(local_strides(x), spec.local_shape, spec.shape)


def keep(x: Any, source: Any) -> None:
    """Record that ``x`` has the strides of ``source``."""
    x.__dict__.pop("_strides", None)
    if "_strides" in source.__dict__:
        x._strides = source._strides


def note(x: Any, strides: tuple[int, ...]) -> None:
    """Record the strides of ``x``, whose shards may not reveal them."""
    x.__dict__.pop("_strides", None)
    spec = x.__dict__["_spec"]  # the attribute of a view that moved would take the view again
    if spec.thin and strides != contiguous(spec.shape):
        x._strides = strides


def on_one_device(func: Any, source: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool]:
    """Return the results of ``func`` on one device, as tensors without memory, and whether they are views.

    Args:
        func: a function that returns views, or may.
        source: its first operand.
        args: its positional arguments, beginning with the source unless that is passed as ``input``.
        kwargs: its keyword arguments.
    """
    with without_modes():
        rest = tuple(torch.empty(x.shape, device="meta") if isinstance(x, T) else x for x in args[1:])  # view_as
    named = tuple((name, value) for name, value in kwargs.items() if name != "input")
    arguments = (func, source._spec.shape, strides_of(source), source.dtype, rest, named)
    values = (*rest, *(value for _, value in named))
    flat = [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]
    if any(isinstance(value, T) for value in flat):
        return _on_meta(*arguments)
    try:
        return _asked_once(*arguments, tuple(map(type, flat)))
    except TypeError:  # lists and slices have no hash
        return _on_meta(*arguments)


def _on_meta(func: Any, shape: Any, strides: Any, dtype: Any, rest: Any, named: Any) -> tuple[list[torch.Tensor], bool]:
    with torch.no_grad(), without_modes():
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        results = func(meta, *rest, **dict(named))
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    return results, all(x.untyped_storage()._cdata == meta.untyped_storage()._cdata for x in results)


@functools.lru_cache(8192)
def _asked_once(
    func: Any, shape: Any, strides: Any, dtype: Any, rest: Any, named: Any, kinds: Any
) -> tuple[list[torch.Tensor], bool]:
    """Cache ``_on_meta``, which takes longer than a plan. ``kinds`` distinguishes equal keys such as ``True`` and 1."""
    return _on_meta(func, shape, strides, dtype, rest, named)


def storage_of(x: Any) -> Any:
    """Return the storage of a tensor or of a DTensor's local tensor."""
    with without_torch_function():
        return x.untyped_storage()
