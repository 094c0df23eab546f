"""Grouped products of PyTorch: rows in groups, each group times a matrix of its own; a heavy operation.

Note [Kernels]
    ``torch.nn.functional.grouped_mm`` multiplies float32, bfloat16 and float16 in one kernel. Other dtypes (float64,
    complex numbers), and torch without it, take a product a group into one output, whose backward costs as much as the
    forward twice: indexing the weight by group in autograd costs a tensor of the whole weight's size for each group.

Note [Weights held back]
    Autograd runs, of the nodes that are ready, the one that forward made last. The gradient of a weight that went
    through `held` is computed in that node, and not beside the input's: so an exchange of the input's gradient that
    began meanwhile, between nodes that forward made after and before, runs under it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hp_platform.devices import devices
from hp_platform.frames import current_frame
from hp_platform.torch.heavy import in_frame

T = torch.Tensor
_kernel = getattr(F, "grouped_mm", None)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_ROWS = 2**31 - 1
_ALIGNMENT = 16  # bytes: the kernel asks for strides that are multiples of it


def grouped_linear(input: T, weight: T, sizes: Sequence[int], *, transposed: bool = False, kernel: bool = True) -> T:
    """Multiply each group of rows by its matrix: ``out[rows of g] = input[rows of g] @ weight[g].T``.

    As the current frame says (``hp_platform.frames``): its input may be stored elsewhere, its output kept, its weight's
    gradient put off.

    Args:
        input: ``[rows, in]``, the groups one after the other.
        weight: ``[groups, out, in]``.
        sizes: rows of each group, on the host; 0 is a group without rows. Their sum is ``rows``.
        transposed: the weight is ``[groups, in, out]``.
        kernel: take torch's grouped product where it has one: Note [Kernels]; False is a product a group.

    Returns:
        ``[rows, out]``.

    Raises:
        ValueError: shapes or sizes that don't fit, or more rows than 32 bits count.
    """
    inner = weight.shape[1 if transposed else 2] if weight.dim() == 3 else None
    if input.dim() != 2 or inner != input.shape[1]:
        form = "[groups, in, out]" if transposed else "[groups, out, in]"
        raise ValueError(
            f"grouped_linear: input must be [rows, in] and weight {form}, got {tuple(input.shape)} and"
            f" {tuple(weight.shape)}."
        )
    if len(sizes) != weight.shape[0] or sum(sizes) != input.shape[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"grouped_linear: {weight.shape[0]} groups need as many sizes that add up to {input.shape[0]} rows, got"
            f" {len(sizes)} that add up to {sum(sizes)}."
        )
    owed: _Owed | None = getattr(weight, "_owed_gradients", None)
    if input.shape[0] > _MOST_ROWS:
        raise ValueError(
            f"grouped_linear: {input.shape[0]} rows are more than {_MOST_ROWS}, which its kernels count in 32 bits:"
            " call it for some of them at a time."
        )
    product = _Grouped(sizes, input.device, transposed, kernel and _takes(input, weight), weight.shape, owed)
    if current_frame() is None and product.kernel and owed is None:  # torch's own graph is enough, and cheaper
        return product.output(input, weight, None)
    return in_frame(product, input, weight)


_Owed = list[tuple[T, Callable[[], T]]]
"""For each product of a weight the zeros in place of the weight's gradient, and what computes the gradient."""


def held(weight: T) -> T:
    """Return a weight whose gradients by `grouped_linear` are computed here: Note [Weights held back]."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    owed: _Owed = []
    out = _Held.apply(weight, owed)
    out._owed_gradients = owed
    return out


class _Held(torch.autograd.Function):
    """A weight, and what is owed to it."""

    @staticmethod
    def forward(ctx: Any, weight: T, owed: _Owed) -> T:
        ctx.owed = owed
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        owed, total = list(ctx.owed), grad
        ctx.owed.clear()
        for zeros, compute in owed:
            total = compute() if total.data_ptr() == zeros.data_ptr() else total + compute()
        return total, None


class _Grouped:
    """A product of given groups."""

    name = "a grouped product"

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        transposed: bool,
        kernel: bool,
        shape: torch.Size,
        owed: _Owed | None,
    ) -> None:
        self._sizes, self._transposed, self.kernel = sizes, transposed, kernel
        self._shape, self._owed = shape, owed
        if kernel:
            ends = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
            self._ends = ends if devices.kind_of(device) == "cpu" else ends.to(device, non_blocking=True)

    def output(self, input: T, weight: T, bias: T | None) -> T:
        """Multiply the rows by the matrices."""
        return self._by_group(input.contiguous(), weight if self._transposed else weight.transpose(1, 2))

    def to_input(self, grad: T, weight: T, shape: Sequence[int]) -> T:
        """Multiply the rows by the matrices the other way."""
        return self._by_group(grad.contiguous(), weight.transpose(1, 2) if self._transposed else weight)

    def to_weights(self, grad: T, input: Callable[[], T], weight: bool, bias: bool = False) -> list[T]:
        """Multiply the groups by each other: one matrix a group, of zeros where it has no rows."""
        if not weight:
            return []
        if self._owed is None or torch.is_grad_enabled():
            return [self._matrices(grad, input)]
        zeros = grad.new_zeros(()).expand(self._shape)
        self._owed.append((zeros, functools.partial(self._matrices, grad, input)))
        return [zeros]

    def _matrices(self, grad: T, input: Callable[[], T]) -> T:
        grad = grad.contiguous()
        left, right = (input(), grad) if self._transposed else (grad, input())
        if self.kernel:
            assert _kernel is not None
            return _kernel(left.t(), right, offs=self._ends)
        out = left.new_empty((len(self._sizes), left.shape[1], right.shape[1]))
        for one, other, matrix in zip(self._groups(left), self._groups(right), out.unbind(0), strict=True):
            torch.mm(one.t(), other, out=matrix)
        return out

    def _by_group(self, rows: T, matrices: T) -> T:
        if self.kernel:
            assert _kernel is not None
            return _kernel(rows, matrices, offs=self._ends)
        out = rows.new_empty((rows.shape[0], matrices.shape[2]))
        for some, matrix, part in zip(self._groups(rows), matrices.unbind(0), self._groups(out), strict=True):
            if len(some):
                torch.mm(some, matrix, out=part)
        return out

    def _groups(self, rows: T) -> Iterator[T]:
        return iter(rows.split(list(self._sizes)))


def _takes(input: T, weight: T) -> bool:
    """Tell whether the kernel multiplies these, forward and backward."""
    if _kernel is None or input.dtype not in _KERNEL_DTYPES or input.dtype is not weight.dtype:
        return False
    if devices.kind_of(input.device) not in ("cpu", "cuda") or not weight.is_contiguous():
        return False
    return not any(width * weight.element_size() % _ALIGNMENT for width in weight.shape[1:])
