"""Indexing: ``x[...]`` and ``x[...] = value``, which reach no kernel interception.

Dims taken in full keep their cut; others are gathered first. Where a tensor is among the indices, all of ``x`` is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops
from mindspore import dtype as mstype
from mindspore._c_expression import TensorPy

from hp_dtensor.layout.placements import Replicate, Shard
from hp_dtensor.layout.sharding import local_shape, take
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.mindspore.backward.autograd import convert, grad_enabled, local_mode, local_only
from hp_dtensor.mindspore.dtensor import DTensor, local_of, redistribute, unwrap, wrap
from hp_dtensor.mindspore.ops.dispatching.dispatch import before_write, run_kernel
from hp_dtensor.mindspore.ops.functions import bind
from hp_dtensor.rules.arguments import expanded, is_full, kept
from hp_dtensor.rules.planning import Call


def _expanded(index: Any, ndim: int) -> list[Any]:
    items = expanded(index, ndim)
    if (used := sum(item is not None for item in items)) > ndim:
        raise IndexError(f"{used} indices for a tensor with {ndim} dims")
    return items


def _is_simple(item: Any) -> bool:
    if isinstance(item, slice):
        return all(part is None or type(part) is int for part in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int


def _items(call: Call) -> list[Any]:
    return _expanded(tuple(slice(*i[1:]) if isinstance(i, tuple) else i for i in call.args[1]), len(call.shape))


def _shape(call: Call) -> list[tuple[int, ...]]:
    sizes, dim = [], 0
    for item in _items(call):
        if item is None:
            sizes.append(1)
            continue
        size = call.shape[dim]
        if isinstance(item, slice):
            sizes.append(len(range(*item.indices(size))))
        elif not -size <= item < size:
            raise IndexError(f"index {item} is out of range for dim {dim} of size {size}")
        dim += 1
    return [tuple(sizes)]


def _arguments(call: Call) -> dict[str, Any]:
    return kept(_items(call), call.shape)


def _local(call: Call) -> Any:
    """By narrow, gather and reshape, dim by dim; what is taken in full is left alone and may be cut."""
    cuts: list[tuple[int, range]] = []
    dim = 0
    for item in _items(call):
        if item is None:
            continue
        size = call.shape[dim]
        taken = range(*item.indices(size)) if isinstance(item, slice) else range(item % size, item % size + 1)
        if taken != range(size):
            cuts.append((dim, taken))
        dim += 1
    shape = call.results[0].local_shape

    def run(args: Any, kwargs: Any) -> Any:
        value = args[0]
        for dim, taken in cuts:
            if taken.step == 1 or len(taken) < 2:
                value = mint.narrow(value, dim, taken.start if taken else 0, len(taken))
            else:
                value = ops.gather(value, Tensor(list(taken), mstype.int32), dim)
        return TensorPy.reshape(value, shape)

    return run


bind("index", "__getitem__", _shape, "input index", "input", arguments=_arguments, local=_local)


def get_item(x: DTensor, index: Any) -> Any:
    """``x[index]``."""
    if local_only():
        return Tensor.__getitem__(local_of(x), index)
    items = index if isinstance(index, tuple) else (index,)
    if all(_is_simple(item) for item in items):
        key = tuple(("slice", i.start, i.stop, i.step) if isinstance(i, slice) else i for i in items)
        return run_kernel("__getitem__", lambda args, kwargs: None, (x, key), {})
    spec = x._spec
    whole = x.full_tensor()
    gathered = tuple(item.full_tensor() if isinstance(item, DTensor) else item for item in items)
    with local_mode():
        result = Tensor.__getitem__(whole, gathered if isinstance(index, tuple) else gathered[0])
    return wrap(result, TensorSpec.of(spec.mesh, (Replicate(),) * spec.mesh.ndim, tuple(result.shape)))


def set_item(x: DTensor, index: Any, value: Any) -> Any:
    """``x[index] = value``, in place; differentiable by both. Each rank writes what it has of the slice.

    Raises:
        ValueError: a plain tensor as the value.
        NotImplementedError: a partial ``x``, or a value with a gradient where some rank has no part of ``x``.
        RuntimeError: ``x`` is a view of another DTensor, or has such views, which would not see the write.
    """
    if local_only():
        return _write(x, index, value)
    before_write(x, "x[index] = value")
    spec = x._spec
    items = _expanded(index, len(spec.shape)) if not isinstance(index, (Tensor, list)) else [index]
    touched, dim, simple = set(), 0, True
    for item in items:
        simple = simple and _is_simple(item)
        if item is None:
            continue
        if not is_full(item, spec.shape[dim]):
            touched.add(dim)
        dim += 1
    if x.is_partial():
        raise NotImplementedError(
            f"x[{index}] = value of a DTensor placed {spec.placements}: the values to write to a Partial are not"
            " known; call reduce_partial() first"
        )
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim:
        raise ValueError(
            f"x[{index}] = value: a plain tensor of shape {tuple(value.shape)} is written into a DTensor placed"
            f" {spec.placements}; distribute it first"
        )
    cut = [p for p in spec.placements if not p.is_replicate()]
    if any(not simple or not isinstance(p, Shard) or p.dim in touched for p in cut):
        return _write_parts(x, index, value)
    if isinstance(value, DTensor):
        target = _value_spec(spec, items, value)
        value = local_of(value if value._spec is target else redistribute(value, target))
    if isinstance(index, tuple):
        index = tuple(local_of(item) if isinstance(item, DTensor) else item for item in index)
    return _write(x, local_of(index) if isinstance(index, DTensor) else index, value)


def _value_spec(spec: TensorSpec, items: list[Any], value: DTensor) -> TensorSpec:
    """Cut as ``x`` is: the dims of ``value`` that stand for whole dims of ``x``, counted from the last."""
    kept = [dim for dim, item in enumerate(i for i in items if i is not None) if isinstance(item, slice)]
    lead = len(kept) - len(value._spec.shape)
    placements = []
    for placement in spec.placements:
        dim = getattr(placement, "dim", None)
        at = kept.index(dim) - lead if dim in kept else -1
        shared = at >= 0 and value._spec.shape[at] == spec.shape[dim]  # type: ignore[index]
        placements.append(Shard(at) if shared and isinstance(placement, Shard) else Replicate())
    return value._spec.with_placements(placements)


def _write_parts(x: DTensor, index: Any, value: Any) -> DTensor:
    """Write by positions: find the element of the value for each position of ``x``, sharded as ``x`` is."""
    spec, mesh = x._spec, x._spec.mesh
    coordinate = mesh.get_coordinate()
    where = np.full(spec.shape, -1, np.int64)
    local_index = tuple(_as_numpy(item) for item in index) if isinstance(index, tuple) else _as_numpy(index)
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    where[local_index] = np.arange(math.prod(shape)).reshape(shape)
    if isinstance(value, DTensor):
        recorded = grad_enabled() and value._requires_grad
        named = np.arange(where.size).reshape(spec.shape)[local_index]
        if recorded and np.unique(named).size < named.size:
            raise NotImplementedError(
                f"x[index] = value, a value that has a gradient: the index names a place of x, of shape {spec.shape}"
                f" placed {spec.placements}, more than once, and all values written there have its gradient;"
                " redistribute x to Replicate() first"
            )
        shards = [local_shape(spec.shape, spec.placements, mesh.shape, at) for at in np.ndindex(*mesh.shape)]
        if recorded and any(0 in shard for shard in shards):
            raise NotImplementedError(
                f"x[{index}] = value, a value that has a gradient: a DTensor of shape {spec.shape} placed"
                f" {spec.placements} leaves some rank without a part; redistribute x to Replicate() first"
            )
        target = value._spec.with_placements((Replicate(),) * mesh.ndim)
        value = convert(value, target, tuple(not p.is_replicate() for p in spec.placements))
    if coordinate is None or 0 in spec.local_shape:
        return x
    mine = take(where, spec.placements, mesh.shape, coordinate)
    with local_mode():
        at = Tensor(np.maximum(mine, 0).reshape(-1).astype(np.int32))
        if isinstance(value, Tensor):
            # plain tensors: MindSpore compares gradients with the shape that Python tells
            flat = TensorPy.reshape(value, (math.prod(shape),)).astype(x.dtype)
            picked = TensorPy.reshape(ops.gather(flat, at, 0), spec.local_shape)
        else:
            picked = ops.full(spec.local_shape, value, dtype=x.dtype)
        local = TensorPy.reshape(x, spec.local_shape)
        TensorPy.copy_(x, ops.where(Tensor(mine >= 0), picked, local))
    return x


def _as_numpy(item: Any) -> Any:
    if isinstance(item, Tensor):
        return (item.full_tensor() if isinstance(item, DTensor) else item).asnumpy()
    return item


def _write(x: DTensor, index: Any, value: Any) -> DTensor:
    spec, plain = x._spec, unwrap(x)
    try:
        with local_mode():
            Tensor.__setitem__(plain, index, value)
    finally:
        wrap(plain, spec)
    return x
