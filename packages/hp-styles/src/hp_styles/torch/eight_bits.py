"""Products of what torchao casts to eight bits: experts' grouped ones, and emulated ones of blocks with scales.

Note [Emulated products]
    What torchao casts is multiplied in float32, or in float64 where the operands are: the same numbers on any device.
    torchao itself emulates grouped products of ``mxfp8`` alone, and none in float64.

Note [Groups in blocks]
    Kernels take groups of a multiple of 16 rows (``mxfp8``: 32), so zeros follow the rows of each group. A scale is of
    the largest absolute value, which zeros do not change, and they add nothing to a product.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Form = Literal["float8-rowwise", "mxfp8"]
T = torch.Tensor
BLOCK = 32
_KERNELS: dict[Form, tuple[int, str, str]] = {
    "float8-rowwise": (16, "fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm"),
    "mxfp8": (BLOCK, "mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm"),
}
"""Form -> what rows of a group are a multiple of, and torchao's module and function."""
_E4M3 = torch.float8_e4m3fn


class EmulatedLinear(nn.Linear):
    """A linear layer that multiplies what ``MXFP8Linear`` of torchao does: Note [Emulated products]."""

    def forward(self, input: T) -> T:
        y = emulated_linear(input, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def emulated_linear(x: T, weight: T) -> T:
    """Multiply ``[..., in]`` by a weight ``[out, in]`` in ``mxfp8``."""
    rows = x.reshape(-1, x.shape[-1])
    y = _Emulated.apply(rows, weight.unsqueeze(0), (len(rows),), False, "mxfp8")
    return y.reshape(*x.shape[:-1], weight.shape[0])


def grouped_product(rows: T, weight: T, sizes: Sequence[int], transposed: bool, *, form: Form, emulated: bool) -> T:
    """Multiply each group of rows by its matrix, both cast to eight bits; backward casts what it multiplies, too.

    A scale is of a row of tokens, and of what it is multiplied by of an expert's weight; in the product that gives a
    weight's gradient, of an expert's tokens in one feature. ``mxfp8``: of each 32 of these.

    Args:
        rows: ``[rows, in]``, the groups one after the other.
        weight: ``[groups, out, in]``.
        sizes: rows of each group, on the host.
        transposed: the weight is ``[groups, in, out]``.
        form: of scales.
        emulated: Note [Emulated products]; else by torchao's kernels, whose result has bfloat16's precision.
    """
    if emulated:
        return _Emulated.apply(rows, weight, tuple(sizes), transposed, form)
    multiple, owner, name = _KERNELS[form]
    padded = [max(1, -(-size // multiple)) * multiple for size in sizes]
    shifts = [end - own for end, own in zip(_starts(padded), _starts(sizes), strict=True)]
    moved = torch.tensor(shifts).repeat_interleave(torch.tensor(sizes), output_size=len(rows))
    places = (torch.arange(len(rows)) + moved).to(rows.device)
    ends = torch.tensor(list(itertools.accumulate(padded)), dtype=torch.int32, device=rows.device)
    columns = weight.transpose(1, 2).contiguous() if transposed else weight
    left = rows.new_zeros(sum(padded), rows.shape[1]).index_copy(0, places, rows)
    run = getattr(importlib.import_module(f"torchao.prototype.moe_training.{owner}"), name)
    out = run(left, columns.transpose(1, 2), ends, pad_token_groups_for_grouped_mm=False)
    return out.index_select(0, places).to(rows.dtype)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


class _Emulated(torch.autograd.Function):
    """`grouped_product`, emulated."""

    @staticmethod
    def forward(ctx: Any, rows: T, weight: T, sizes: Sequence[int], transposed: bool, form: Form) -> T:
        ctx.sizes, ctx.transposed, ctx.form = sizes, transposed, form
        ctx.save_for_backward(rows, weight)
        matrices = _cast(weight, 1 if transposed else 2, form)
        matrices = matrices if transposed else matrices.transpose(1, 2)
        return _by_group(_cast(rows, 1, form), matrices, sizes).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            matrices = _cast(weight, 2 if ctx.transposed else 1, ctx.form)
            matrices = matrices.transpose(1, 2) if ctx.transposed else matrices
            of_rows = _by_group(_cast(gradient, 1, ctx.form), matrices, ctx.sizes).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            left, right = (rows, gradient) if ctx.transposed else (gradient, rows)
            of_weight = torch.zeros_like(weight)
            for one, other, matrix in zip(left.split(ctx.sizes), right.split(ctx.sizes), of_weight, strict=True):
                if len(one):
                    matrix.copy_(_cast(one, 0, ctx.form).t() @ _cast(other, 0, ctx.form))
        return of_rows, of_weight, None, None, None


def _by_group(rows: T, matrices: T, sizes: Sequence[int]) -> T:
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(list(sizes)), matrices, strict=True)])


def _cast(values: T, dim: int, form: Form) -> T:
    """Return the numbers that the eight bits and scales of values stand for; a product sums over the dim."""
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    single = values.to(torch.float32)
    if form == "mxfp8":
        to_mx, mode = _blocks()
        rows = single.movedim(dim, -1)
        scale, data = to_mx(F.pad(rows, (0, -rows.shape[-1] % BLOCK)).contiguous(), _E4M3, BLOCK, mode)
        whole = data.to(wide).unflatten(-1, (-1, BLOCK)) * scale.to(wide).unsqueeze(-1)
        return whole.flatten(-2)[..., : rows.shape[-1]].movedim(-1, dim)
    utils = importlib.import_module("torchao.float8.float8_utils")
    amax = single.abs().amax(dim, keepdim=True)
    scale = utils.amax_to_scale(amax, _E4M3, round_scales_to_power_of_2=True)
    return utils.to_fp8_saturated(single * scale, _E4M3).to(wide) / scale


@functools.cache
def _blocks() -> tuple[Any, Any]:
    to_mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
    return to_mx, importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
