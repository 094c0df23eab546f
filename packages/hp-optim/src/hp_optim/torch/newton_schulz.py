"""Batched Newton-Schulz iteration.

Note [Gram iteration]
    Every X_k of the iteration is Q_k X with Q_k a polynomial in the Gram matrix G = X X^T, and so is its own Gram
    matrix, R_k = Q_k G Q_k. So the steps can be taken on matrices of the smaller size m, and X, of the larger size n,
    is multiplied once: 34 m^3 + 4 m^2 n operations for five steps in place of 10 m^3 + 20 m^2 n. That pays from
    n = 2 m on. Errors of R_k in the directions of small singular values grow by the square of the first coefficient
    with each step, so X is multiplied and the iteration begins anew after five steps, or before such errors come near
    one: in bfloat16 after two steps at most (five would give singular values of 30), where it pays from n = 3 m on.

Note [Padded matrices]
    The bits of a product on CPU depend on where its operands lie relative to the vector registers' alignment. In a
    batch, matrices of odd sizes would lie differently, and a matrix's result would depend on its place. So rows and
    columns are filled up with zeros to whole cache lines, which changes no product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hp_platform import get_platform

Triple = tuple[float, float, float]
_AT_ONCE = 1 << 26
"""Elements that are computed together, so that the temporaries stay small beside a model."""
_CACHED = 1 << 17
"""The same on CPU, for each thread, so that the temporaries stay in its cache."""


def compute_dtype(dtype: torch.dtype, device: torch.device, name: str | None = None) -> torch.dtype:
    """Choose the dtype of the products.

    Args:
        dtype: of the parameters.
        device: where they are computed.
        name: the dtype. Default: bfloat16 on accelerators, float32 on CPU, float64 for float64 parameters.
    """
    if name is not None:
        return getattr(torch, name)
    if dtype is torch.float64:
        return dtype
    return torch.float32 if get_platform().devices.kind_of(device) == "cpu" else torch.bfloat16


def orthogonalize(
    batch: torch.Tensor,
    coefficients: Sequence[Triple],
    epsilon: float,
    *,
    dtype: torch.dtype | None = None,
    gram: bool | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bring the singular values of matrices near one. Each matrix has the same result in any batch.

    Args:
        batch: ``[matrices, rows, columns]``; not changed.
        coefficients: of each step.
        epsilon: added to the norm by which each matrix is divided.
        dtype: of the products. Default: the batch's.
        gram: iterate on Gram matrices; see Note [Gram iteration]. Default: where it pays.
        out: where the result goes; it may be the batch. Default: new memory, in the dtype of the products.
    """
    dtype = dtype or batch.dtype
    if out is None:
        out = torch.empty(batch.shape, dtype=dtype, device=batch.device)
    elements = _CACHED * torch.get_num_threads() if get_platform().devices.kind_of(batch.device) == "cpu" else _AT_ONCE
    most = max(1, elements // max(1, batch.shape[-1] * batch.shape[-2]))
    for part, place in zip(batch.split(most), out.split(most)):
        place.copy_(_computed(part, coefficients, epsilon, dtype, gram))
    return out


def _computed(
    batch: torch.Tensor, coefficients: Sequence[Triple], epsilon: float, dtype: torch.dtype, gram: bool | None
) -> torch.Tensor:
    rows, columns = batch.shape[-2:]
    tall = rows > columns
    wide = torch.promote_types(torch.promote_types(batch.dtype, dtype), torch.float32)
    # Row by row: the norm of a whole batch of matrices may be summed in another order than that of one.
    norm = torch.linalg.vector_norm(batch, dim=-1, keepdim=True, dtype=wide)
    norm = torch.linalg.vector_norm(norm, dim=-2, keepdim=True)
    x = _padded(batch.mT if tall else batch, dtype, norm.add_(epsilon))
    few = dtype not in (torch.float32, torch.float64)
    if gram is None:
        gram = max(rows, columns) >= (3 if few else 2) * min(rows, columns)
    x = _by_gram_matrices(x, _phases(coefficients, dtype)) if gram else _directly(x, coefficients)
    return (x.mT if tall else x)[:, :rows, :columns]


def _padded(batch: torch.Tensor, dtype: torch.dtype, norm: torch.Tensor) -> torch.Tensor:
    """Return contiguous matrices divided by their norms; see Note [Padded matrices]."""
    line = 64 // dtype.itemsize
    count, rows, columns = batch.shape
    padded = [-(-size // line) * line for size in (rows, columns)]
    x = torch.empty(count, *padded, dtype=dtype, device=batch.device)
    if padded != [rows, columns]:
        x.zero_()
    x[:, :rows, :columns].copy_(batch).div_(norm)
    return x


def _polynomial(gram: torch.Tensor, step: Triple, out: torch.Tensor) -> torch.Tensor:
    """Compute the matrix by which a step multiplies X, from the Gram matrix."""
    a, b, c = step
    torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out


def _directly(x: torch.Tensor, coefficients: Sequence[Triple]) -> torch.Tensor:
    gram, factor = _squares(x, 2)
    other = torch.empty_like(x)
    for step in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.bmm(_polynomial(gram, step, factor), x, out=other)
        x, other = other, x
    return x


def _phases(coefficients: Sequence[Triple], dtype: torch.dtype) -> list[list[Triple]]:
    """Divide the steps where the iteration begins anew."""
    phases: list[list[Triple]] = []
    error = 1.0
    for step in coefficients:
        if not phases or len(phases[-1]) == 5 or error > 0.25:
            phases.append([])
            error = torch.finfo(dtype).eps
        phases[-1].append(step)
        error *= step[0] ** 2
    return phases


def _by_gram_matrices(x: torch.Tensor, phases: Sequence[Sequence[Triple]]) -> torch.Tensor:
    gram, factor, product, spare = _squares(x, 4)
    other = torch.empty_like(x)
    for steps in phases:
        torch.bmm(x, x.mT, out=gram)
        for number, step in enumerate(steps):
            last = _polynomial(gram, step, factor if number else product)
            if number:
                torch.bmm(factor, product, out=spare)
                product, spare = spare, product
            if number + 1 < len(steps):
                torch.bmm(last, gram, out=spare)
                torch.bmm(spare, last, out=gram)
        torch.bmm(product, x, out=other)
        x, other = other, x
    return x


def _squares(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return memory for matrices of the smaller size."""
    return [x.new_empty(len(x), x.shape[-2], x.shape[-2]) for _ in range(count)]
