"""Indexing, ``x[index]`` and ``x[index] = value``: dims that the index takes in full stay sharded.

A mask, a bool or a 0-d tensor in the index makes the result's shape (or what is read) a matter of values: then
everything is gathered first, and the result is replicated.

Note [What a rank writes]
Dims that the index takes in full stay cut, and a value that has them is cut alike: one that is laid out as the slice is
not sent either. Of a dim that is cut and indexed by ints and slices, a rank writes the part that lies in its shard. An
index of tensors into a cut dim is resolved on positions: which element of the value belongs at each place of ``x``, cut
as ``x`` is. All other values are replicated and vary where ``x`` is cut; a Partial ``x`` takes parts of a reduction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor.layout.placements import Placement, Replicate, Shard
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.arguments import expanded, is_full, offset
from hp_dtensor.rules.planning import Call
from hp_dtensor.torch.backward.autograd import convert
from hp_dtensor.torch.dtensor import DTensor, local_of, local_view, wrap
from hp_dtensor.torch.moves.redistribute import execute
from hp_dtensor.torch.ops import indexing
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.dispatching.dispatch import replicate_plain, write_into_plain
from hp_dtensor.torch.ops.functions import bind
from hp_dtensor.torch.ops.whole import on_whole
from hp_platform.torch.internals import plainly, without_torch_function

T = torch.Tensor
_HERE = ("tensor",)
"""Stands for a tensor in the index: the tensors come after it, as operands."""


def get_item(func: Any, args: Any, gathered: Any) -> Any:
    """``x[index]`` with tensors, lists or bools in the index.

    Args:
        func: ``Tensor.__getitem__``.
        args: x and the index; at least one DTensor among them.
        gathered: the handler that runs a function on whole tensors.
    """
    x, index = args
    items = tuple(map(without_tensors, index if type(index) is tuple else (index,)))
    if any(isinstance(item, T) and type(item) is not DTensor for item in (x, *items)):
        (x, *items), _ = replicate_plain(func, (x, *items), {})
    if any(by_value(item) for item in items):
        return gathered(func, (x, tuple(items)), {})
    if not any(isinstance(item, (T, list)) for item in items):
        return func(x, tuple(items))
    pattern = tuple(_HERE if isinstance(item, T) else item for item in items)
    return dispatch.planned(_index, (x, pattern, *(item for item in items if isinstance(item, T))), {})


def without_tensors(item: Any) -> Any:
    """Return an item of an index with the bounds of a slice as ints."""
    if isinstance(item, slice):
        return slice(*(int(bound) if isinstance(bound, T) else bound for bound in (item.start, item.stop, item.step)))
    return item


def by_value(item: Any) -> bool:
    """Tell whether what an item of an index takes is a matter of its values."""
    if isinstance(item, T):
        return item.dtype in (torch.bool, torch.uint8) or not item.dim()
    if isinstance(item, list):
        return any(map(by_value, item))
    return isinstance(item, bool)


def _index(x: Any, pattern: tuple[Any, ...], *tensors: Any) -> Any:
    remaining = iter(tensors)
    return x[tuple(next(remaining) if item == _HERE else item for item in pattern)]


def _arguments(call: Call) -> dict[str, Any]:
    shape = call.tensors[0]._spec.shape
    pattern, others = call.args[1], [tensor._spec.shape for tensor in call.tensors[1:]]
    indices = [torch.empty(other, dtype=torch.int64, device="meta") for other in others]
    kept, _ = kept_dims(lambda meta: _index(meta, pattern, *indices), shape, _full(pattern, len(shape), shape))
    return {"kept": kept}


def kept_dims(
    read: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int], full: Sequence[bool]
) -> tuple[tuple[int | None, ...], torch.Size]:
    """For each dim of an indexed tensor, the operand's dim that it is in full, or None; and the result's shape.

    Found by the sizes of a result whose full dims have sizes that nothing else has.

    Args:
        read: indexes a tensor on meta.
        shape: the operand's.
        full: for each of its dims, whether the index takes it in full.
    """
    result = read(torch.empty(shape, device="meta")).shape
    unlike = 1 + max((0, *shape, *result))
    marked = {unlike + dim: dim for dim, whole in enumerate(full) if whole}
    sizes = [unlike + dim if unlike + dim in marked else size for dim, size in enumerate(shape)]
    marked_result = read(torch.empty(sizes, device="meta"))
    return tuple(marked.get(size) for size in marked_result.shape), result


def _full(pattern: tuple[Any, ...], ndim: int, shape: tuple[int, ...]) -> list[bool]:
    """For each dim of the operand, whether the index takes it in full."""
    items = [item for item in pattern if item is not None]
    dots = items.index(Ellipsis) if Ellipsis in items else len(items)
    after = items[dots + 1 :]
    items = [*items[:dots], *[slice(None)] * (ndim - dots - len(after)), *after]
    return [is_full(item, size) for item, size in zip(items, shape, strict=True)]


def _local(call: Call) -> Any:
    """On a shard a slice over a whole dim must not name the global size."""
    pattern, shape = call.args[1], call.specs[0].shape
    if not any(isinstance(item, slice) and item != slice(None) for item in pattern):
        return None
    full = iter(_full(pattern, len(shape), shape))
    items: list[Any] = []
    for item in pattern:
        if item is Ellipsis:
            taken = len(shape) - sum(1 for i in pattern if i is not None and i is not Ellipsis)
            for _ in range(taken):
                next(full)
            items.append(item)
        else:
            items.append(slice(None) if item is not None and next(full) else item)
    fixed = tuple(items)
    return lambda x, _, *tensors: _index(x, fixed, *tensors)


bind("index", _index, arguments=_arguments, local=_local, hot=False)

Items = tuple[Any, ...]


def set_item(func: Any, args: Any, kwargs: Any) -> None:
    """``x[index] = value``; differentiable by both.

    Args:
        func: ``Tensor.__setitem__``.
        args: x, the index, the value: a number, or a tensor that broadcasts to ``x[index]``.
        kwargs: none.
    """
    x, index, value = args
    if type(x) is not DTensor:
        return write_into_plain(func, args, kwargs)
    items = tuple(map(indexing.without_tensors, index if type(index) is tuple else (index,)))
    if any(isinstance(t, T) and type(t) is not DTensor for t in (x, value, *items)):
        (x, value, *items), _ = replicate_plain(func, (x, value, *items), {})
    dispatch.mesh_of(func, (x, value, *items), {})
    spec = x._spec
    if x.is_partial() and not isinstance(value, T):
        scalar = torch.full((), value, dtype=x.dtype, device=x.device)
        value = wrap(scalar, TensorSpec.of(spec.mesh, [Replicate()] * spec.mesh.ndim, ()))
    masked = len(items) == 1 and _is_mask(items[0]) and not (isinstance(value, T) and value.dim())
    if masked and tuple(items[0].shape) == spec.shape[: items[0].dim()]:
        _fill(x, items[0], value)
    else:
        _write(x, tuple(_plain(item) for item in items), value)


def index_put_(func: Any, args: Any, kwargs: Any) -> DTensor:
    """``x.index_put_(indices, values, accumulate=False)``."""
    x, indices, values, accumulate = _bound(args, kwargs)
    if not accumulate:
        set_item(T.__setitem__, (x, indices, values), {})
        return x
    whole = x.new_zeros(x.shape).redistribute(placements=[Replicate()] * x._spec.mesh.ndim)
    return x.add_(on_whole(torch.index_put, (whole, indices, values, True), {}))


def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.index_put``, laid out as its operand is."""
    x, indices, values, accumulate = _bound(args, kwargs)
    if accumulate and x._spec.replicated:
        return on_whole(torch.index_put, (x, indices, values, True), {})
    return index_put_(T.index_put_, (x.clone(), indices, values, accumulate), {})


def select_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.select_scatter``, laid out as its operand is."""

    def run(input: DTensor, src: Any, dim: int, index: int) -> Any:
        return _with(input, dim, index, src)

    return run(*args, **kwargs)


def slice_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.slice_scatter``, laid out as its operand is."""

    def run(input: DTensor, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        return _with(input, dim, slice(start, end, step), src)

    return run(*args, **kwargs)


def _with(x: DTensor, dim: int, item: Any, value: Any) -> Any:
    index = (slice(None),) * (dim % max(x.dim(), 1)) + (item,)
    shape = torch.empty(x.shape, device="meta")[index].shape
    if shape != value.shape:  # an assignment would broadcast it
        raise RuntimeError(f"src has shape {tuple(value.shape)}, the slice that it replaces has {tuple(shape)}")
    result = x.clone()
    set_item(T.__setitem__, (result, index, value), {})
    return result


def _bound(args: Any, kwargs: Any) -> tuple[Any, Items, Any, bool]:
    names = ("input", "indices", "values", "accumulate")
    bound = {"accumulate": False, **dict(zip(names, args, strict=False)), **kwargs}
    indices = tuple(slice(None) if item is None else item for item in bound["indices"])
    return bound["input"], indices, bound["values"], bound["accumulate"]


def _is_mask(item: Any) -> bool:
    return isinstance(item, DTensor) and item.dtype in (torch.bool, torch.uint8) and item.dim() > 0


def _plain(item: Any) -> Any:
    """Return an index without DTensors."""
    if isinstance(item, DTensor):
        item = local_view(item.full_tensor())
        return item if item.dim() or item.dtype is torch.bool else int(item)
    return item


def _is_cut(placement: Placement) -> bool:
    return not (placement.is_replicate() or placement.is_partial())


def _cut_alone(spec: TensorSpec) -> TensorSpec:
    """Return a layout with the shards of another one, and its shape."""
    return spec.with_placements([p if _is_cut(p) else Replicate() for p in spec.placements])


# ---- the value, as it is written ----
def _written(value: Any, spec: TensorSpec, kept: Items = (), ndim: int = 0) -> Any:
    """Return the local tensor of ``value`` that goes into a tensor of layout ``spec``; return a number unchanged.

    Args:
        value: a number or a DTensor.
        spec: layout of what is written to.
        kept: for each dim of ``x[index]``, the dim of ``x`` that it is in full, or None.
        ndim: dims of ``x[index]``.
    """
    if not isinstance(value, DTensor):
        return value
    while kept and value.dim() > ndim and value.shape[0] == 1:  # torch passes over them
        value = value.squeeze(0)
    placements: list[Placement] = []
    for placement in spec.placements:
        if _is_cut(placement):
            dim = getattr(placement, "dim", None)
            at = kept.index(dim) - ndim + value.dim() if dim in kept else -1
            same = at >= 0 and dim is not None and value.shape[at] == spec.shape[dim]
            placements.append(dataclasses.replace(placement, dim=at) if same else Replicate())
        else:
            placements.append(placement)
    vary = tuple(_is_cut(a) and b.is_replicate() for a, b in zip(spec.placements, placements, strict=True))
    return local_of(convert(value, value._spec.with_placements(placements), vary if any(vary) else None))


# ---- three ways to write ----
def _fill(x: DTensor, mask: DTensor, value: Any) -> None:
    """One value wherever ``mask`` is set, which stays cut as ``x`` is."""
    spec = x._spec
    whole: Any = mask.bool().reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())).expand(spec.shape)
    here = local_view(whole.redistribute(placements=_cut_alone(spec).placements))
    plainly(T.masked_fill_, (), (x, here, _written(value, spec)))


def _write(x: DTensor, items: Items, value: Any) -> None:
    spec, full = x._spec, _taken_in_full(items, x._spec.shape)
    cut = {getattr(p, "dim", None) for p in spec.placements if _is_cut(p)}
    if not cut:
        return _copy(x, items, _written(value, spec))
    touched = {dim for dim in cut if full is not None and dim is not None and not full[dim]}
    tensors = any(isinstance(item, (T, list)) for item in items)
    if full is None or None in cut or (touched and (tensors or _cut_otherwise(spec))):
        return _scatter(x, items, value)
    whole = iter(full)
    items = tuple(slice(None) if i is not None and next(whole) else i for i in expanded(items, x.dim()))
    kept, result = indexing.kept_dims(lambda meta: meta[_on_meta(items)], spec.shape, full)
    value = _written(value, spec, kept, len(result))
    return _copy(x, *_own_part(spec, items, touched, value, len(result)))


def _cut_otherwise(spec: TensorSpec) -> bool:
    """Tell whether a rank's part of a dim may be another thing than one run."""
    return any(_is_cut(placement) and not isinstance(placement, Shard) for placement in spec.placements)


def _copy(x: DTensor, items: Items, value: Any) -> None:
    if any(isinstance(item, (T, list, bool)) for item in items):  # no view
        plainly(T.__setitem__, (), (x, items, value))
        return
    with without_torch_function():  # autograd looks at x where its view is written to
        place = x[items]
        if not isinstance(value, T):
            place.fill_(value)
            return
        while value.dim() > place.dim() and value.shape[0] == 1:
            value = value.squeeze(0)
        place.copy_(value.clone() if _overlaps(place, value) else value)


def _overlaps(place: Any, value: Any) -> bool:
    """Tell whether ``value`` is other elements of the memory of ``place``, or these in other strides.

    torch refuses to copy those. A rank whose part is empty would not, and would wait for the others ever after.
    """
    if place.untyped_storage()._cdata != value.untyped_storage()._cdata:
        return False
    return place.data_ptr() != value.data_ptr() or place.shape != value.shape or place.stride() != value.stride()


def _own_part(spec: TensorSpec, items: Items, touched: set[Any], value: Any, ndim: int) -> tuple[Items, Any]:
    """Return the index into the local tensor and the part of the value for it; None for a dim without any index."""
    local_items: list[Any] = []
    dim, place = 0, 0
    pending: list[int] = []  # dims of x[index] to the right of each int that becomes a slice
    for item in items:
        if item is None:
            local_items.append(None)
            place += 1
            continue
        size = spec.shape[dim]
        is_slice = isinstance(item, slice)
        if dim not in touched:
            local_items.append(item)
        elif is_slice:
            begin, end, step = item.indices(size)
            local, first, count = _overlap(begin, end, step, *offset(spec, dim))
            local_items.append(local)
            at = place - ndim + (value.dim() if isinstance(value, T) else 0)
            if isinstance(value, T) and at >= 0 and value.shape[at] == len(range(begin, end, step)) != 1:
                value = value.narrow(at, first, count)
        else:
            begin = item % size
            local_items.append(_overlap(begin, begin + 1, 1, *offset(spec, dim))[0])
            pending.append(ndim - place)
        place += is_slice
        dim += 1
    for right in pending:
        if isinstance(value, T) and value.dim() >= right:
            value = value.unsqueeze(value.dim() - right)
    return tuple(local_items), value


def _overlap(begin: int, end: int, step: int, start: int, size: int) -> tuple[slice, int, int]:
    """Return the local slice of a slice of a sharded dim, its first element's number, and the number of elements."""
    count = len(range(begin, end, step))
    first = min(max(0, -((begin - start) // step)), count)
    after = min(max(first, -((begin - start - size) // step)), count)
    if after == first:
        return slice(0, 0), first, 0
    low = begin + first * step - start
    return slice(low, low + (after - first - 1) * step + 1, step), first, after - first


def _scatter(x: DTensor, items: Items, value: Any) -> None:
    """By positions: where each of the value's elements belongs, in the order of the value.

    Elements of one position are all written, one after the other, because each of them has a gradient.
    """
    spec, own = x._spec, _cut_alone(x._spec)
    numbers = torch.arange(math.prod(spec.shape), device=x.device)
    whole = numbers.view(spec.shape)
    taken = whole[items]
    mine = execute(whole, own.with_placements([Replicate()] * spec.mesh.ndim), own)
    at = torch.full_like(numbers, -1)
    at[mine.reshape(-1)] = numbers[: mine.numel()]
    at = at[taken.reshape(-1)]
    here, value = at >= 0, _written(value, spec)
    if isinstance(value, T):
        while value.dim() > taken.dim() and value.shape[0] == 1:
            value = value.squeeze(0)
        value = value.expand(taken.shape).reshape(-1)[here].to(x.dtype)
    else:
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    plainly(T.index_put_, (), (x, torch.unravel_index(at[here], mine.shape), value))


# ---- what an index takes ----
def _taken_in_full(items: Items, shape: tuple[int, ...]) -> list[bool] | None:
    """For each dim, whether the index takes it in full; None where masks or bools decide what is taken."""
    if any(map(indexing.by_value, items)):
        return None
    taken = [item for item in expanded(items, len(shape)) if item is not None]
    if len(taken) > len(shape):
        raise IndexError(f"too many indices for a tensor of dimension {len(shape)}: {len(taken)}")
    return [is_full(item, size) for item, size in zip(taken, shape, strict=True)]


def _on_meta(items: Items) -> Items:
    return tuple(torch.empty(i.shape, dtype=torch.int64, device="meta") if isinstance(i, T) else i for i in items)
