"""Indexing by tensors: the dims that the index takes in full stay sharded, the others are gathered.

A mask, a bool or a 0-d tensor in the index makes the result's shape (or what is read) a matter of values: then
everything is gathered first, and the result is replicated.
"""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor.placements import Replicate
from hp_dtensor.torch import dispatch
from hp_dtensor.torch.dtensor import DTensor, local_view
from hp_dtensor.torch.functions import bind
from hp_dtensor.torch.plans import Call
from hp_dtensor.torch.redistribute import execute

__all__ = ["fill", "get_item"]

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
    items = tuple(map(_without_tensors, index if type(index) is tuple else (index,)))
    if any(isinstance(item, T) and type(item) is not DTensor for item in (x, *items)):
        (x, *items), _ = dispatch._replicate_plain(func, (x, *items), {})
    if any(_by_value(item) for item in items):
        return gathered(func, (x, tuple(items)), {})
    if not any(isinstance(item, (T, list)) for item in items):
        return func(x, tuple(items))
    pattern = tuple(_HERE if isinstance(item, T) else item for item in items)
    return dispatch.planned(_index, (x, pattern, *(item for item in items if isinstance(item, T))), {})


def fill(x: DTensor, index: Any, value: float) -> None:
    """``x[index] = value`` on each rank's part: nothing is sent.

    Args:
        x: the tensor.
        index: ints and slices, of whole dims too.
        value: a number.
    """
    spec = x._spec
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(
            f"x[index].fill_(value) of a DTensor placed {spec.placements} that requires grad: x[index] had to be"
            " gathered; fill it under torch.no_grad(), or use torch.where"
        )
    if x.is_partial():
        raise NotImplementedError(
            f"x[index].fill_(value) of a DTensor placed {spec.placements}; reduce_partial() first"
        )
    mask = torch.zeros(spec.shape, dtype=torch.bool, device=x.device)
    mask[index] = True
    replicated = spec.with_placements([Replicate()] * spec.mesh.ndim)
    with torch.no_grad():
        local_view(x).masked_fill_(execute(mask, replicated, spec), value)


def _without_tensors(item: Any) -> Any:
    if isinstance(item, slice):
        return slice(*(int(bound) if isinstance(bound, T) else bound for bound in (item.start, item.stop, item.step)))
    return item


def _by_value(item: Any) -> bool:
    if isinstance(item, T):
        return item.dtype in (torch.bool, torch.uint8) or not item.dim()
    if isinstance(item, list):
        return any(map(_by_value, item))
    return isinstance(item, bool)


def _index(x: Any, pattern: tuple[Any, ...], *tensors: Any) -> Any:
    given = iter(tensors)
    return x[tuple(next(given) if item == _HERE else item for item in pattern)]


def _arguments(call: Call) -> dict[str, Any]:
    """``kept``, found by the sizes of a result whose full dims have sizes that nothing else has."""
    shape = call.tensors[0]._spec.shape  # type: ignore[union-attr]
    pattern, others = call.args[1], [tensor._spec.shape for tensor in call.tensors[1:]]  # type: ignore[union-attr]
    indices = [torch.empty(other, dtype=torch.int64, device="meta") for other in others]
    result = _index(torch.empty(shape, device="meta"), pattern, *indices).shape
    unlike = 1 + max((0, *shape, *result))
    marked = {unlike + dim: dim for dim, full in enumerate(_full(pattern, len(shape), shape)) if full}
    sizes = [unlike + dim if unlike + dim in marked else size for dim, size in enumerate(shape)]
    made = _index(torch.empty(sizes, device="meta"), pattern, *indices)
    return {"kept": tuple(marked.get(size) for size in made.shape)}


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
