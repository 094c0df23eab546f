"""Indexing: ``x[...]`` and ``x[...] = value``, which reach no kernel interception.

Dims taken in full keep their cut; others are gathered first. Where a tensor is among the indices, all of ``x`` is.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, ops
from mindspore import dtype as mstype
from mindspore._c_expression import TensorPy  # type: ignore[attr-defined]

from hp_dtensor.mindspore.autograd import local_mode, local_only
from hp_dtensor.mindspore.bindings import bind
from hp_dtensor.mindspore.dispatch import run_kernel
from hp_dtensor.mindspore.dtensor import DTensor, local_of, redistribute, unwrap, wrap
from hp_dtensor.mindspore.plans import Call
from hp_dtensor.placements import Replicate, Shard
from hp_dtensor.spec import TensorSpec

__all__ = ["get_item", "set_item"]


def _expanded(index: Any, ndim: int) -> list[Any]:
    """The index with ``...`` written out, one entry a dim and one for each None."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > ndim:
        raise IndexError(f"{used} indices for a tensor with {ndim} dims")
    missing = [slice(None)] * (ndim - used)
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    return [*items[: dots[0]], *missing, *items[dots[0] + 1 :]] if dots else [*items, *missing]


def _is_simple(item: Any) -> bool:
    if isinstance(item, slice):
        return all(part is None or type(part) is int for part in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int


def _items(call: Call) -> list[Any]:
    return _expanded(tuple(slice(*i[1:]) if isinstance(i, tuple) else i for i in call.args[1]), len(call.shape))


def _shape(call: Call) -> list[tuple[int, ...]]:
    made, dim = [], 0
    for item in _items(call):
        if item is None:
            made.append(1)
            continue
        size = call.shape[dim]
        if isinstance(item, slice):
            made.append(len(range(*item.indices(size))))
        elif not -size <= item < size:
            raise IndexError(f"index {item} is out of range for dim {dim} of size {size}")
        dim += 1
    return [tuple(made)]


def _arguments(call: Call) -> dict[str, Any]:
    kept: list[int | None] = []
    dim = 0
    for item in _items(call):
        if isinstance(item, slice):
            kept.append(dim if item.indices(call.shape[dim]) == (0, call.shape[dim], 1) else None)
        elif item is None:
            kept.append(None)
        dim += item is not None
    return {"kept": tuple(kept)}


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
    given = tuple(item.full_tensor() if isinstance(item, DTensor) else item for item in items)
    with local_mode():
        made = Tensor.__getitem__(whole, given if isinstance(index, tuple) else given[0])
    return wrap(made, TensorSpec.of(spec.mesh, (Replicate(),) * spec.mesh.ndim, tuple(made.shape)))


def set_item(x: DTensor, index: Any, value: Any) -> Any:
    """``x[index] = value``, in place.

    Raises:
        NotImplementedError: an index that cuts a sharded dim, a partial ``x``, or a tensor among the indices of a
            sharded ``x``.
    """
    if local_only():
        return _write(x, index, value)
    spec = x._spec
    items = _expanded(index, len(spec.shape)) if not isinstance(index, (Tensor, list)) else [index]
    touched, dim, simple = set(), 0, True
    for item in items:
        simple = simple and _is_simple(item)
        if item is None:
            continue
        if not (isinstance(item, slice) and item.indices(spec.shape[dim]) == (0, spec.shape[dim], 1)):
            touched.add(dim)
        dim += 1
    for placement in spec.placements:
        if placement.is_replicate():
            continue
        if (
            not simple
            or placement.is_partial()
            or getattr(placement, "dim", None) in touched
            or not hasattr(placement, "dim")
        ):
            raise NotImplementedError(
                f"x[{index}] = value of a DTensor placed {spec.placements}: the written dims are not whole here;"
                " redistribute to Replicate() first"
            )
    if isinstance(value, DTensor):
        target = _value_spec(spec, items, value)
        value = local_of(value if value._spec is target else redistribute(value, target))
    elif isinstance(value, Tensor) and value.ndim:
        raise ValueError(
            f"x[{index}] = value: a plain tensor of shape {tuple(value.shape)} is written into a DTensor placed"
            f" {spec.placements}; distribute it first"
        )
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


def _write(x: DTensor, index: Any, value: Any) -> DTensor:
    spec, plain = x._spec, unwrap(x)
    try:
        with local_mode():
            Tensor.__setitem__(plain, index, value)
    finally:
        wrap(plain, spec)
    return x
