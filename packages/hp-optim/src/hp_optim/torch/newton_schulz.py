"""Batched Newton-Schulz iteration.

Note [Gram iteration]
    Every X_k of the iteration is Q_k X with Q_k a polynomial in the Gram matrix G = X X^T, and so is its own Gram
    matrix, R_k = Q_k G Q_k. So the steps can be taken on matrices of the smaller size m, and X, of the larger size n,
    is multiplied once: 34 m^3 + 4 m^2 n operations for five steps in place of 10 m^3 + 20 m^2 n. That pays from
    n = 2 m on. Errors of R_k in the directions of small singular values grow by the square of the first coefficient
    with each step, so it takes float32 at least (bfloat16 gives singular values of 1.5), and begins anew with the
    product after five steps.

Note [Padded matrices]
    The bits of a product on CPU depend on where its operands lie relative to the vector registers' alignment. In a
    batch, matrices of odd sizes would lie differently, and a matrix's result would depend on its place. So rows and
    columns are filled up with zeros to whole cache lines, which changes no product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["compute_dtype", "orthogonalize"]

Triple = tuple[float, float, float]
_AT_ONCE = 1 << 26
"""Elements that are computed together, so that the temporaries stay small beside a model."""
_RESTART = 5


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Choose the dtype of the products: bfloat16 on accelerators, float32 on CPU, float64 for float64 parameters."""
    if dtype is torch.float64:
        return dtype
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalize(
    batch: torch.Tensor, coefficients: Sequence[Triple], epsilon: float, *, gram: bool | None = None
) -> torch.Tensor:
    """Bring the singular values of matrices near one. Each matrix has the same result in any batch.

    Args:
        batch: ``[matrices, rows, columns]``, in the dtype of the products; not changed.
        coefficients: of each step.
        epsilon: added to the norm by which each matrix is divided.
        gram: iterate on Gram matrices; see Note [Gram iteration]. Default: where it pays and is accurate.
    """
    most = max(1, _AT_ONCE // max(1, batch.shape[-1] * batch.shape[-2]))
    if len(batch) > most:
        return torch.cat([orthogonalize(part, coefficients, epsilon, gram=gram) for part in batch.split(most)])
    shape = batch.shape
    # Row by row: the norm of a whole batch of matrices may be summed in another order than that of one.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(batch, dim=-1, keepdim=True), dim=-2, keepdim=True)
    batch = _padded(batch / (norm + epsilon))
    tall = shape[-2] > shape[-1]
    x = batch.mT if tall else batch
    if gram is None:
        gram = max(shape[-2:]) >= 2 * min(shape[-2:]) and batch.dtype in (torch.float32, torch.float64)
    x = _by_gram_matrices(x, coefficients) if gram else _directly(x, coefficients)
    return (x.mT if tall else x)[:, : shape[-2], : shape[-1]]


def _padded(batch: torch.Tensor) -> torch.Tensor:
    """See Note [Padded matrices]."""
    line = 64 // batch.dtype.itemsize
    rows, columns = (-(-size // line) * line for size in batch.shape[-2:])
    if (rows, columns) == tuple(batch.shape[-2:]):
        return batch
    padded = batch.new_zeros(len(batch), rows, columns)
    padded[:, : batch.shape[-2], : batch.shape[-1]] = batch
    return padded


def _polynomial(gram: torch.Tensor, b: float, c: float) -> torch.Tensor:
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


def _directly(x: torch.Tensor, coefficients: Sequence[Triple]) -> torch.Tensor:
    for a, b, c in coefficients:
        x = torch.baddbmm(x, _polynomial(torch.bmm(x, x.mT), b, c), x, beta=a)
    return x


def _by_gram_matrices(x: torch.Tensor, coefficients: Sequence[Triple]) -> torch.Tensor:
    for start in range(0, len(coefficients), _RESTART):
        steps = coefficients[start : start + _RESTART]
        gram = torch.bmm(x, x.mT)
        product: torch.Tensor | None = None
        for number, (a, b, c) in enumerate(steps):
            factor = _polynomial(gram, b, c)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            product = factor if product is None else torch.bmm(factor, product)
            if number + 1 < len(steps):
                gram = torch.bmm(torch.bmm(factor, gram), factor)
        assert product is not None
        x = torch.bmm(product, x)
    return x
