"""Rows between orders, each with its transpose: sums in a fixed order, no atomic additions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hp_platform import get_platform

T = torch.Tensor


class Spread(torch.autograd.Function):
    """Rows repeated `times` and put in an order."""

    @staticmethod
    def forward(ctx: Any, rows: T, order: T, inverse: T, times: int) -> T:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return rows.index_select(0, order if times == 1 else order.div(times, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad.index_select(0, inverse)
        return (back if ctx.times == 1 else back.unflatten(0, (-1, ctx.times)).sum(1)), None, None, None


class Combined(torch.autograd.Function):
    """Weighted sums of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: T, weights: T, order: T, inverse: T) -> T:
        ctx.save_for_backward(rows, weights, order, inverse)
        own = rows.index_select(0, inverse).unflatten(0, weights.shape)
        return (own * weights.unsqueeze(-1).to(rows.dtype)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T | None, T | None, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        to_rows = to_weights = None
        if ctx.needs_input_grad[0]:
            each = grad.unsqueeze(1) * weights.unsqueeze(-1).to(rows.dtype)
            to_rows = each.flatten(0, 1).index_select(0, order)
        if ctx.needs_input_grad[1]:
            own = rows.index_select(0, inverse).unflatten(0, weights.shape)
            to_weights = torch.linalg.vecdot(own, grad.unsqueeze(1)).to(weights.dtype)
        return to_rows, to_weights, None, None


class Summed(torch.autograd.Function):
    """Rows added up at places; ``index_add``'s own backward saves the rows, which it does not need."""

    @staticmethod
    def forward(ctx: Any, rows: T, places: T, count: int) -> T:
        ctx.save_for_backward(places)
        return rows.new_zeros((count, rows.shape[1])).index_add_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class Repeated(torch.autograd.Function):
    """Each row as often as its group is long; the gradient of a row is a sum over its group, in its order."""

    @staticmethod
    def forward(ctx: Any, rows: T, sizes: tuple[int, ...]) -> T:
        ctx.sizes = sizes
        return torch.repeat_interleave(rows, torch.tensor(sizes, device=rows.device), dim=0, output_size=sum(sizes))

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        return torch.stack([part.sum(0) for part in grad.split(list(ctx.sizes))]), None


class Recomputed(torch.autograd.Function):
    """A function of tensors without parameters, whose backward computes it again: only its inputs are saved."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., T], *values: T) -> T:
        ctx.function = function
        ctx.save_for_backward(*values)
        return function(*values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> tuple[T | None, ...]:
        values = [value.detach().requires_grad_() for value in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*values)
        return None, *torch.autograd.grad(out, values, grad)


_BLOCK = 1 << 16  # elements: what is in between of a block stays in a core's cache


class SwiGlu(torch.autograd.Function):
    """``silu(gate) * up * weights``; its backward computes ``silu`` again: only its inputs are saved.

    On CPU some rows at a time, which costs half as much: a tensor of all rows is written to memory and read again.
    """

    @staticmethod
    def forward(ctx: Any, weights: T | None, *inner: T) -> T:
        ctx.save_for_backward(weights, *inner)
        gate, up = _halves(inner)
        out = torch.empty_like(up, memory_format=torch.contiguous_format)
        for rows in _blocks(out):
            torch.mul(F.silu(gate[rows]), up[rows], out=out[rows])
            if weights is not None:
                out[rows] *= weights[rows]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: T) -> tuple[T | None, ...]:
        weights, *inner = ctx.saved_tensors
        (gate, up), to_inner = _halves(inner), [torch.empty_like(each) for each in inner]
        to_gate, to_up = _halves(to_inner)
        to_weights = torch.empty_like(weights) if ctx.needs_input_grad[0] else None
        for rows in _blocks(up):
            own, active = grad[rows], F.silu(gate[rows])
            weighted = own.clone() if weights is None else own * weights[rows]
            torch.mul(weighted, active, out=to_up[rows])
            if to_weights is not None:
                to_weights[rows] = torch.linalg.vecdot(own, active.mul_(up[rows])).unsqueeze(-1)
            weighted *= up[rows]
            torch.ops.aten.silu_backward.grad_input(weighted, gate[rows], grad_input=to_gate[rows])
        return to_weights, *to_inner


def _halves(inner: Sequence[T]) -> tuple[T, T]:
    """Return gate and up projection, of one tensor one after the other or of two."""
    gate, up = inner[0].chunk(2, 1) if len(inner) == 1 else inner
    return gate, up


def _blocks(rows: T) -> list[slice]:
    """Cut rows into blocks; on devices there is one."""
    step = (
        max(_BLOCK // max(rows.shape[1], 1), 1)
        if get_platform().devices.kind_of(rows.device) == "cpu"
        else max(len(rows), 1)
    )
    return [slice(first, first + step) for first in range(0, len(rows), step)]


class Pinned(torch.autograd.Function):
    """A layer's output, whose backward first compares choices, where a checkpoint computed them again.

    The forward's choices stay beside those that it saves, which a checkpoint computes again. Where both differ,
    gradients would meet other rows than those of the forward, often of the same shapes.
    """

    @staticmethod
    def forward(ctx: Any, out: T, chosen: T, name: str) -> T:
        ctx.save_for_backward(chosen)
        ctx.chosen, ctx.name = chosen, name
        ctx.mark_dirty(out)  # a view could not be changed in place, as models do that add their shared experts
        return out

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None, None]:
        (again,) = ctx.saved_tensors
        if again.data_ptr() != ctx.chosen.data_ptr() and not torch.equal(again, ctx.chosen):
            raise RuntimeError(
                f"{ctx.name}: the block was computed again for backward, and {int((again != ctx.chosen).sum())} of"
                f" {again.numel()} choices of experts are others than in forward. What comes before the router is not"
                " deterministic: let the checkpoint keep the state of the generators (preserve_rng_state), or save the"
                " choices: torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=lambda:"
                " create_selective_checkpoint_contexts([aten.sort.stable, aten.topk.default])), of torch.ops."
            )
        return grad, None, None
