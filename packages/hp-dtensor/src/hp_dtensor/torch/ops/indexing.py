"""Indexing by tensors: the dims that the index takes in full stay sharded, the others are gathered.

A mask, a bool or a 0-d tensor in the index makes the result's shape (or what is read) a matter of values: then
everything is gathered first, and the result is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_dtensor.rules.planning import Call
from hp_dtensor.torch.dtensor import DTensor
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_dtensor.torch.ops.dispatching.plain import replicate_plain
from hp_dtensor.torch.ops.functions import bind

_impl = torch._C._disabled_torch_function_impl
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
    shape = call.tensors[0]._spec.shape  # type: ignore[union-attr]
    pattern, others = call.args[1], [tensor._spec.shape for tensor in call.tensors[1:]]  # type: ignore[union-attr]
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
    return [
        isinstance(item, slice) and item.indices(size) == (0, size, 1) for item, size in zip(items, shape, strict=True)
    ]


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
