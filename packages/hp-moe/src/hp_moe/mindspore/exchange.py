"""Rows between ranks and between orders on MindSpore, each with its transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, _Function, mint, ops

from hp_platform import get_platform

Numbers = np.ndarray


def index(places: Numbers, count: int) -> Tensor:
    """Return places as the indices of 32 bits that kernels take.

    Raises:
        ValueError: there are more rows than these count.
    """
    if count > np.iinfo(np.int32).max:
        raise ValueError(
            f"experts: {count} rows on one rank are more than {np.iinfo(np.int32).max}, which kernels count in 32 bits:"
            " use more ranks or smaller micro-batches"
        )
    return Tensor(places.astype(np.int32))


def _at(rows: Tensor, places: Numbers) -> Tensor:
    return ops.gather(rows, index(places, rows.shape[0]), 0)


def _added(rows: Tensor, places: Numbers, count: int) -> Tensor:
    zeros = mint.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
    return ops.index_add(zeros, index(places, count), rows, 0) if len(places) and count else zeros


class _Taken(_Function):
    """Rows at some places; the gradient is added up there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Numbers) -> Tensor:
        ctx.places, ctx.count = places, rows.shape[0]
        return _at(rows, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _added(grad, ctx.places, ctx.count), None


def taken(rows: Tensor, places: Numbers) -> Tensor:
    """Return the rows at some places."""
    return _Taken.apply(rows, places)


class Exchange(_Function):
    """An all-to-all of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.splits = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sent, received, group = ctx.splits
        return _all_to_all(grad, received, sent, group), None, None, None


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    out = mint.zeros((sum(received), *rows.shape[1:]), dtype=rows.dtype)
    get_platform().collectives.all_to_all(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


class Gathered(_Function):
    """The rows of all ranks; gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _scatter(grad, ctx.group), None


class Scattered(_Function):
    """A part of a sum over ranks; the transpose of ``Gathered``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _scatter(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, ctx.group), None


def _gather(rows: Tensor, group: Any) -> Tensor:
    out = mint.zeros((rows.shape[0] * get_platform().groups.size(group), *rows.shape[1:]), dtype=rows.dtype)
    get_platform().collectives.all_gather(out, rows.contiguous(), group=group)
    return out


def _scatter(rows: Tensor, group: Any) -> Tensor:
    out = mint.zeros((rows.shape[0] // get_platform().groups.size(group), *rows.shape[1:]), dtype=rows.dtype)
    get_platform().collectives.reduce_scatter(out, rows.contiguous(), group=group)
    return out


class Spread(_Function):
    """Rows repeated `times` and put in an order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Numbers, inverse: Numbers, times: int) -> Tensor:
        ctx.inverse, ctx.times = inverse, times
        return _at(rows, order // times)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = _at(grad, ctx.inverse)
        if ctx.times > 1:
            back = mint.sum(back.reshape(-1, ctx.times, *back.shape[1:]), 1)
        return back, None, None, None


class Combined(_Function):
    """Weighted sums of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Numbers, inverse: Numbers) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.order, ctx.inverse = order, inverse
        own = _at(rows, inverse).reshape(*weights.shape, -1)
        return mint.sum(own * weights.astype(rows.dtype).unsqueeze(-1), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        each = grad.unsqueeze(1) * weights.astype(rows.dtype).unsqueeze(-1)
        own = _at(rows, ctx.inverse).reshape(*weights.shape, -1)
        to_weights = mint.sum(own * grad.unsqueeze(1), -1).astype(weights.dtype)
        return _at(each.reshape(-1, rows.shape[1]), ctx.order), to_weights, None, None


class Summed(_Function):
    """Rows added up where they belong."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Numbers, count: int) -> Tensor:
        ctx.places, ctx.shape = places, rows.shape
        return _added(rows, places, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows = _at(grad, ctx.places) if grad.shape[0] else mint.zeros(ctx.shape, dtype=grad.dtype)
        return rows, None, None


class Repeated(_Function):
    """Each row as often as its group is long."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.places, ctx.count = np.repeat(np.arange(len(sizes)), sizes), len(sizes)
        return _at(rows, ctx.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _added(grad, ctx.places, ctx.count), None


class Grouped(_Function):
    """Each group of rows times a matrix of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: Sequence[int], transposed: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sizes, ctx.transposed = sizes, transposed
        return _by_group(rows, weight, sizes, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        left, right = (rows, grad) if ctx.transposed else (grad, rows)
        at, matrices = 0, []
        for size in ctx.sizes:
            if size:
                matrix = mint.matmul(left[at : at + size].T, right[at : at + size])
            else:
                matrix = mint.zeros(weight.shape[1:], dtype=weight.dtype)
            matrices.append(matrix.unsqueeze(0))
            at += size
        to_weight = mint.cat(matrices) if matrices else mint.zeros(weight.shape, dtype=weight.dtype)
        return _by_group(grad, weight, ctx.sizes, not ctx.transposed), to_weight, None, None


def _by_group(rows: Tensor, weight: Tensor, sizes: Sequence[int], transposed: bool) -> Tensor:
    at, parts = 0, []
    for place, size in enumerate(sizes):
        if size:
            matrix = weight[place] if transposed else weight[place].T
            parts.append(mint.matmul(rows[at : at + size], matrix))
        at += size
    if not parts:
        return mint.zeros((0, weight.shape[2 if transposed else 1]), dtype=rows.dtype)
    return mint.cat(parts)
