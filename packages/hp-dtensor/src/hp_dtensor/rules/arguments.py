"""Arguments of rules, and other facts of a planned call that hold on any framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.layout.placements import Shard
from hp_dtensor.layout.sharding import chunk
from hp_dtensor.layout.spec import TensorSpec
from hp_dtensor.rules.planning import Call


def ints(values: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes or dims, given one by one or as a sequence."""
    flat = values[0] if len(values) == 1 and isinstance(values[0], (tuple, list)) else values
    return tuple(int(value) for value in flat)


def last_two(call: Call) -> dict[str, Any]:
    """Return the last two dims, or the only one."""
    return {"dim": tuple(range(len(call.shape)))[-2:]}


def all_dims(call: Call) -> dict[str, Any]:
    """Return the dim that stands for all."""
    return {"dim": None}


def select_arguments(call: Call) -> dict[str, Any]:
    """Return the dims that stay where one is selected."""
    dim = call.bound["dim"] % max(len(call.shape), 1)
    return {"kept": tuple(d for d in range(len(call.shape)) if d != dim)}


def transposed(ndim: int, a: int, b: int) -> dict[str, Any]:
    """Return the order of dims of which two are swapped."""
    order = list(range(ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return {"order": tuple(order)}


def expanded(index: Any, ndim: int) -> list[Any]:
    """Return an index with ``...`` and omitted dims expanded, with one entry per dim and one for each None."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    missing = [slice(None)] * (ndim - used)
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    return [*items[: dots[0]], *missing, *items[dots[0] + 1 :]] if dots else [*items, *missing]


def is_full(item: Any, size: int) -> bool:
    """Tell whether an item of an index takes all of a dim, in order."""
    return isinstance(item, slice) and item.indices(size) == (0, size, 1)


def kept(items: Sequence[Any], shape: Sequence[int]) -> dict[str, Any]:
    """Return, for each dim of an indexed tensor, the operand's dim that is taken in full for it, or None.

    Args:
        items: the index, expanded: slices, ints and None.
        shape: the operand's.
    """
    found: list[int | None] = []
    dim = 0
    for item in items:
        if item is None:
            found.append(None)
            continue
        if isinstance(item, slice):
            found.append(dim if is_full(item, shape[dim]) else None)
        dim += 1
    return {"kept": tuple(found)}


def offset(spec: TensorSpec, dim: int) -> tuple[int, int]:
    """Return start and length of this rank's contiguous piece of a dim."""
    coordinate: Any = spec.mesh.get_coordinate()
    start, size = 0, spec.shape[dim]
    for axis, placement in enumerate(spec.placements):
        if placement == Shard(dim):
            inner, size = chunk(size, spec.mesh.shape[axis], coordinate[axis])
            start += inner
    return start, size


def summed_axes(result: TensorSpec, operand: TensorSpec) -> list[int]:
    """Return the axes over which a result is partial and an operand is not."""
    pairs = zip(result.placements, operand.placements, strict=True)
    return [axis for axis, (p, q) in enumerate(pairs) if p.is_partial() and not q.is_partial()]


def adds_bias(call: Call, operand: TensorSpec) -> bool:
    """Tell whether this rank adds a bias: the first on the axes over which its operand's products are summed."""
    coordinate = call.results[0].mesh.get_coordinate()
    return coordinate is None or all(coordinate[axis] == 0 for axis in summed_axes(call.results[0], operand))
