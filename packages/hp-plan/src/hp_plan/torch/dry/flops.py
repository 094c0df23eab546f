"""Floating-point operations of matrix products and attention: torch's formulas, and those that torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

T = torch.Tensor


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the operations of an operator, a multiplication and an addition as two; 0 of others than products.

    As torch does, attention is counted in full, whether or not it is causal.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        out: what it returned.
    """
    packet = func._overloadpacket
    if packet in _FORMULAS:
        return _FORMULAS[packet](*args)
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0


def _grouped(rows: T, matrices: T, *_: Any) -> int:
    """Count a grouped product: where one of both has a matrix for each group, the groups share the other's dim."""
    groups = len(rows) if rows.dim() == matrices.dim() == 3 else 1
    return 2 * groups * rows.shape[-2] * rows.shape[-1] * matrices.shape[-1]


def _attention(q: T, k: T, v: T, *_: Any) -> int:
    """Count the scores and their product with the values."""
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(grad: T, q: T, k: T, v: T, *_: Any) -> int:
    """Count the scores, computed again, and the gradients of scores, queries, keys and values."""
    return 2 * q.shape[:-1].numel() * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
