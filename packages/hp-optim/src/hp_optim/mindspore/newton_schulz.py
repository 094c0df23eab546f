"""Batched Newton-Schulz iteration; see the notes [Gram iteration] and [Padded matrices] of `hp_optim.torch`'s.

Note [Numbers as tensors]
    A Python number beside a tensor of float64 is rounded to float32 by MindSpore's kernels, so it is made a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor, ops

Triple = tuple[float, float, float]
_RESTART = 5


def compute_dtype(dtype: Any, kind: str, name: str | None = None) -> Any:
    """Choose the dtype of the products.

    Args:
        dtype: of the parameters.
        kind: of device.
        name: the dtype. Default: bfloat16 on accelerators, float32 on CPU, float64 for float64 parameters.

    Raises:
        ValueError: bfloat16 on CPU, where MindSpore has no kernels for it.
    """
    if name == "bfloat16" and kind == "cpu":
        raise ValueError("Muon: ns_dtype='bfloat16', and MindSpore's kernels on CPU have no bfloat16; use 'float32'")
    if name is not None:
        return getattr(mindspore, name)
    if dtype == mindspore.float64:
        return dtype
    return mindspore.float32 if kind == "cpu" else mindspore.bfloat16


def scalar(value: float, like: Tensor) -> Tensor:
    """Return a number in the dtype of a tensor; see Note [Numbers as tensors]."""
    return Tensor(value, like.dtype)


def orthogonalize(batch: Tensor, coefficients: Sequence[Triple], epsilon: float) -> Tensor:
    """Bring the singular values of matrices near one. Each matrix has the same result in any batch.

    Args:
        batch: ``[matrices, rows, columns]``, in the dtype of the products.
        coefficients: of each step.
        epsilon: added to the norm by which each matrix is divided.
    """
    rows, columns = batch.shape[-2:]
    x = _padded(batch)
    norm = ops.sqrt((x * x).sum(-1, keepdims=True).sum(-2, keepdims=True))
    x = x / (norm + scalar(epsilon, batch))
    x = _swapped(x) if rows > columns else x
    gram = max(rows, columns) >= 2 * min(rows, columns) and batch.dtype != mindspore.bfloat16
    x = _by_gram_matrices(x, coefficients) if gram else _directly(x, coefficients)
    return (_swapped(x) if rows > columns else x)[:, :rows, :columns]


def _padded(x: Tensor) -> Tensor:
    """Fill matrices up with zeros to whole cache lines."""
    for dim in (-2, -1):
        lacking = -x.shape[dim] % (64 // x.itemsize)
        if lacking:
            shape = list(x.shape)
            shape[dim] = lacking
            x = ops.cat((x, ops.zeros(tuple(shape), dtype=x.dtype)), dim)
    return x


def _swapped(x: Tensor) -> Tensor:
    return ops.swapaxes(x, -1, -2)


def _directly(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    for a, b, c in ((scalar(each, x) for each in step) for step in coefficients):
        gram = ops.bmm(x, _swapped(x))
        x = a * x + ops.bmm(b * gram + c * ops.bmm(gram, gram), x)
    return x


def _by_gram_matrices(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    one = ops.eye(x.shape[-2], x.shape[-2], x.dtype)
    for start in range(0, len(coefficients), _RESTART):
        gram = ops.bmm(x, _swapped(x))
        product: Any = None
        for a, b, c in ((scalar(each, x) for each in step) for step in coefficients[start : start + _RESTART]):
            factor = a * one + b * gram + c * ops.bmm(gram, gram)
            product = factor if product is None else ops.bmm(factor, product)
            gram = ops.bmm(ops.bmm(factor, gram), factor)
        x = ops.bmm(product, x)
    return x
