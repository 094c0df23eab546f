"""MindSpore's part of hp-moe: see `hp_moe.port`.

Note [Numbers on the host]
    Which token goes where is a matter of some integers a token. They are computed with NumPy: the layer waits for the
    host once for its counts anyway, and MindSpore has no kernels on CPU for most of it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hp_dtensor import DeviceMesh, DTensor, Partial, Placement
from hp_dtensor.mindspore.extend import distribute_parameter
from hp_moe.mindspore.balance import recomputes as recomputes
from hp_moe.mindspore.exchange import Combined, Exchange, Gathered, Grouped, Repeated, Scattered, Spread, Summed, taken
from hp_moe.port import Traits
from hp_moe.routes.dispatch import Sources
from hp_moe.routes.forced import forced_counts
from hp_platform import get_platform

Numbers = np.ndarray


# ---- modules ----
def is_weight(value: Any) -> bool:
    return isinstance(value, (Parameter, Tensor)) and len(value.shape) == 3


def distribute(
    module: nn.Cell, mesh: DeviceMesh, placements: Mapping[str, tuple[Placement, ...]], src_data_rank: int | None
) -> None:
    for name, placement in placements.items():
        distribute_parameter(getattr(module, name), mesh, placement, src_data_rank=src_data_rank)


def replace_forward(module: nn.Cell, forward: Callable[..., Any]) -> None:
    module.construct = types.MethodType(forward, module)


def belongings(
    module: nn.Cell, names: Sequence[str], cut: Placement, axes: int, optimizers: Sequence[Any]
) -> list[str]:
    raise NotImplementedError(
        f"{type(module).__name__}: experts do not move to other ranks on MindSpore. Leave homes as they are;"
        " replicas work"
    )


def move(module: nn.Cell, names: Sequence[str], cut: Placement, optimizers: Sequence[Any]) -> None:
    belongings(module, names, cut, 1, optimizers)


def named_modules(model: nn.Cell) -> Iterable[tuple[str, nn.Cell]]:
    return model.cells_and_names()


# ---- inputs ----
def traits(value: Tensor) -> Traits:
    name = str(value.dtype)
    numbers = "floating" if "Float" in name else "integer" if "Int" in name else "other"
    return Traits(name, numbers, "", False)


def listed(value: Tensor | Numbers) -> list[Any]:
    return (value if isinstance(value, np.ndarray) else value.asnumpy()).tolist()


def pinned(out: Tensor, chosen: Tensor, name: str) -> Tensor:
    """Return an output: MindSpore's recompute differentiates what it computes again, with its own choices."""
    return out


# ---- numbers ----
def slots(chosen: Tensor, table: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    numbers = chosen.asnumpy()
    counts = forced_counts(numbers.shape[0], numbers.shape[-1], len(table))
    if counts is not None:
        numbers = np.repeat(np.arange(len(table)), counts).reshape(numbers.shape[::-1]).T
    unknown = (numbers < 0) | (numbers >= len(table))
    return np.asarray(table, np.int64)[np.where(unknown, 0, numbers).reshape(-1)], unknown.sum()


def not_finite(values: Tensor) -> Numbers:
    return (~np.isfinite(values.astype(mindspore.float32).asnumpy())).sum()


def count(slots: Numbers, size: int) -> Numbers:
    return np.bincount(slots, minlength=size)


def order(slots: Numbers) -> tuple[Numbers, Numbers]:
    places = np.argsort(slots, kind="stable")
    return places, np.argsort(places, kind="stable")


def copies(slots: Numbers, token: Numbers, tokens: int, widths: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    there = np.repeat(np.arange(len(widths)), widths)[slots]
    goes = np.zeros((tokens, len(widths)), bool)
    goes[token, there] = True
    return np.nonzero(goes.T)[1], (goes.cumsum(0) - 1)[token, there], goes.sum(0)


def message(parts: Sequence[Any], like: Any) -> Numbers:
    return np.concatenate([np.asarray(part, np.int64).reshape(-1) for part in parts])


def split(numbers: Numbers, sizes: Sequence[int]) -> Sequence[Numbers]:
    return np.split(numbers, np.cumsum(sizes)[:-1])


def exchange_numbers(
    message: Numbers, sent: Sequence[int], received: Sequence[int], group: Any
) -> Callable[[], tuple[list[int], list[int]]]:
    numbers = message.tolist()
    arrived = numbers if group is None else _exchanged(message, sent, received, group).tolist()
    return lambda: (numbers, arrived)


def _exchanged(numbers: Numbers, sent: Sequence[int], received: Sequence[int], group: Any) -> Numbers:
    out = ops.zeros((sum(received), 1), mindspore.int64)
    own = Tensor(numbers.reshape(-1, 1).astype(np.int64))
    get_platform().collectives.all_to_all(out, own, list(received), list(sent), group=group)
    return out.asnumpy().reshape(-1)


def positions(blocks: Sequence[tuple[int, int]], like: Any) -> Numbers:
    return np.concatenate([np.arange(first, first + rows) for first, rows in blocks])


def seats(slots: Numbers, size: int, capacity: int) -> tuple[Numbers, Numbers, Numbers]:
    order, counts = np.argsort(slots, kind="stable"), np.bincount(slots, minlength=size)
    number, all_seats = slots[order], size * capacity
    place = np.arange(len(slots)) - (counts.cumsum() - counts)[number]
    seat = np.where(place < capacity, number * capacity + place, all_seats)
    taken, own = np.full(all_seats + 1, len(slots)), np.empty_like(slots)
    taken[seat], own[order] = order, seat
    return own, taken[:-1], np.maximum(counts - capacity, 0)


def spoiled(values: Tensor, wrong: Numbers) -> Tensor:
    return values * float("nan") if wrong else values


def ordered_range(slots: Numbers, first: int, width: int, count: int) -> Numbers:
    own = np.where((slots < first) | (slots >= first + width), width, slots - first)
    return np.argsort(own, kind="stable")[:count]


def counted(count: int, times: int, like: Any) -> Numbers:
    return np.repeat(np.arange(count), times)


def repeated_table(table: tuple[int, ...], sizes: Sequence[int], like: Any) -> Numbers:
    return np.repeat(np.asarray(table, np.int64), sizes)


def repeated_numbers(counts: Any, like: Tensor) -> Tensor:
    numbers = counts.asnumpy() if isinstance(counts, Tensor) else np.asarray(counts)
    return Tensor(np.repeat(np.arange(len(numbers)), numbers))


# ---- rows ----
def take(rows: Any, places: Numbers) -> Any:
    return rows[places] if isinstance(rows, np.ndarray) else taken(rows, places)


def spread(rows: Tensor, order: Numbers, inverse: Numbers, times: int) -> Tensor:
    return Spread.apply(rows, order, inverse, times)


class _Transfer:
    """Exchanges at once, in ``begin``: gradients of MindSpore's functions come in no order that is known."""

    def __init__(self, group: Any, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> None:
        self.group, self.ways, self.early = group, list(zip(sent, received, strict=True)), False

    def ahead(self, *tensors: Any) -> Sequence[Any]:
        return tensors

    def begin(self, *tensors: Any) -> Sequence[Any]:
        return [exchange(each, *way, self.group) for each, way in zip(tensors, self.ways, strict=True)]

    end = ahead


def transfer(group: Any, sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> _Transfer:
    return _Transfer(group, sent, received)


def exchange(rows: Any, sent: Sequence[int], received: Sequence[int], group: Any) -> Any:
    if group is None:
        return rows
    if isinstance(rows, np.ndarray):
        return _exchanged(rows, sent, received, group)
    return Exchange.apply(rows, list(sent), list(received), group)


def padded(rows: Any, size: int) -> Any:
    shape = (size - rows.shape[0], *rows.shape[1:])
    if isinstance(rows, np.ndarray):
        return np.concatenate([rows, np.zeros(shape, rows.dtype)])
    return mint.cat([rows, mint.zeros(shape, dtype=rows.dtype)]) if shape[0] else rows


def gathered(rows: Any, group: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return Gathered.apply(Tensor(rows), group).asnumpy()
    return Gathered.apply(rows, group)


def scattered(rows: Tensor, group: Any) -> Tensor:
    return Scattered.apply(rows, group)


def combined(rows: Tensor, weights: Tensor, order: Numbers, inverse: Numbers) -> Tensor:
    return Combined.apply(rows, weights, order, inverse)


def summed(rows: Tensor, places: Numbers, count: int) -> Tensor:
    return Summed.apply(rows, places, count)


def joined(parts: Sequence[Tensor]) -> Tensor:
    return mint.cat(list(parts))


def ones(rows: Tensor) -> Tensor:
    return mint.ones((rows.shape[0],), dtype=rows.dtype)


# ---- experts ----
def piece_sums() -> Any:
    raise NotImplementedError("ExpertParallel(deterministic=True) is not built for MindSpore; leave deterministic out")


def in_pieces(
    sums: Any,
    sources: Sources,
    group: Any,
    leaves: Sequence[Tensor],
    weights: Mapping[str, Tensor],
    guests: Mapping[str, Tensor],
    rows: Tensor,
    run: Callable[..., Tensor],
) -> Tensor:
    return piece_sums()


def grouped(rows: Tensor, weight: Tensor, sizes: Sequence[int], transposed: bool, kernel: bool) -> Tensor:
    return Grouped.apply(rows, weight, list(sizes), transposed)


def held(weight: Tensor) -> Tensor:
    """Leave the gradient of a weight where it is: nothing runs meanwhile."""
    return weight


def repeated(rows: Any, sizes: Sequence[int]) -> Any:
    return np.repeat(rows, sizes, 0) if isinstance(rows, np.ndarray) else Repeated.apply(rows, list(sizes))


def recomputed(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Apply a function; its gradients are MindSpore's own, which saves what it needs."""
    return function(*values)


def is_swiglu(module: nn.Cell) -> bool:
    """Tell whether packed experts compute ``silu(gate) * up`` in between: each has its own method for that."""
    return False


def swiglu(inner: Sequence[Tensor], weights: Tensor | None) -> Tensor:
    """Return ``silu(gate) * up * weights``; silu's own kernel on CPU computes its gradient in float32."""
    gate, up = inner
    out = gate * mint.sigmoid(gate) * up
    return out if weights is None else out * weights


def cast(value: Tensor, like: Tensor) -> Tensor:
    return value if value.dtype == like.dtype else value.astype(like.dtype)


def varying(value: Any) -> Tensor:
    assert isinstance(value, DTensor)
    if value.dtype in (mindspore.int32, mindspore.int64):
        return value.to_local()
    return value.to_local(grad_placements=[Partial()] * value.device_mesh.ndim)
