"""Attention with the logarithm of its normaliser, which is what makes parts of it addable; one table of kernels.

Shapes are [batch, heads, sequence, head size]; queries, keys and values have the same heads. The normaliser is
[batch, heads, queries], float32, or float64 for float64. A kernel's backward takes the output and the normaliser of the
whole row, and so gives the part of the gradient that goes through the keys at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

T = torch.Tensor
_aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_QUERIES = 1024  # whose weights are in memory at once, under a mask
_ALIGNED = 32  # rows of the normaliser that the efficient kernel writes and reads


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention.

    Attributes:
        name: for reading.
        takes: ``(q, k, v)``: whether it computes these.
        forward: ``(q, k, v, causal, scale)``: output, in the queries' dtype, and normaliser.
        backward: ``(grad, q, k, v, out, lse, causal, scale)``: gradients of q, k and v.
    """

    name: str
    takes: Callable[[T, T, T], bool]
    forward: Callable[[T, T, T, bool, float], tuple[T, T]]
    backward: Callable[[T, T, T, T, T, T, bool, float], tuple[T, T, T]]


def kernel_for(q: T, k: T, v: T) -> Kernel:
    """Return the first kernel of the table that takes the input; the last takes all."""
    return next(kernel for kernel in KERNELS if kernel.takes(q, k, v))


def _one_head_size(q: T, v: T) -> bool:
    return q.shape[-1] == v.shape[-1] and q.numel() > 0


def _cpu_takes(q: T, k: T, v: T) -> bool:
    return q.device.type == "cpu" and q.dtype in (torch.float64, torch.float32, *_HALF) and _one_head_size(q, v)


def _cpu_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as its forward lays it
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_takes(q: T, k: T, v: T) -> bool:
    if q.device.type != "cuda" or q.dtype not in _HALF or not _one_head_size(q, v) or torch.version.hip:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    results = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return results[0], results[1]


def _flash_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    lengths = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, seed[0], scale=scale
    )


def _efficient_takes(q: T, k: T, v: T) -> bool:
    if q.device.type != "cuda" or q.dtype not in (torch.float32, *_HALF) or not q.numel() or torch.version.hip:
        return False
    unit = 16 // q.element_size()
    return q.shape[-1] % unit == 0 and v.shape[-1] % unit == 0


def _efficient_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _ALIGNED), value=float("inf"))
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    needed = [True, True, True, False]
    gradients = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse.contiguous(), seed, seed, 0.0, needed, causal, scale=scale
    )
    return gradients[:3]


def _wide(*tensors: T) -> tuple[T, ...]:
    return tuple(x.float() if x.dtype in _HALF else x for x in tensors)


def _scores(q: T, k: T, causal: bool, scale: float) -> T:
    scores = (q @ k.mT).mul_(scale)
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _plain_forward(q: T, k: T, v: T, causal: bool, scale: float) -> tuple[T, T]:
    dtype = q.dtype
    q, k, v = _wide(q, k, v)
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores.sub_(lse.unsqueeze(-1)).exp_() @ v).to(dtype), lse


def _plain_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, causal: bool, scale: float) -> tuple[T, T, T]:
    dtype = q.dtype
    grad, q, k, v, out = _wide(grad, q, k, v, out)
    weights = _scores(q, k, causal, scale).sub_(lse.unsqueeze(-1)).exp_()
    inner = (grad @ v.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return (inner @ k).to(dtype), (inner.mT @ q).to(dtype), (weights.mT @ grad).to(dtype)


# ---- under a mask: by matrix products, a slice of the queries at a time ----
def _masked_weights(q: T, k: T, lse: T | None, mask: T, scale: float, cap: float | None) -> tuple[T, T, T | None]:
    """Return the weights of a slice of queries, and their normaliser, which is -inf where nothing is seen.

    With a cap, return the hyperbolic tangents of the logits over it, too.
    """
    scores, bent = (q @ k.mT).mul_(scale), None
    if cap is not None:
        bent = scores.div_(cap).tanh_()
        scores = bent * cap
    scores = scores.masked_fill_(~mask, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return scores.sub_(lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_(), lse, bent


def masked_forward(q: T, k: T, v: T, mask: T, scale: float, cap: float | None = None) -> tuple[T, T]:
    """Output, in the queries' dtype, and normaliser.

    Args:
        q: [batch, heads, queries, head size].
        k: keys, of as many heads.
        v: values.
        mask: True where a query sees a key, [batch or 1, 1, queries, keys].
        scale: of the logits.
        cap: what the scaled logits are capped at, softly: ``cap * tanh(logits / cap)``; None is nothing.
    """
    dtype = q.dtype
    q, k, v = _wide(q, k, v)
    outs, norms = [], []
    for part, seen in zip(q.split(_QUERIES, 2), mask.split(_QUERIES, 2), strict=True):
        weights, lse, _ = _masked_weights(part, k, None, seen, scale, cap)
        outs.append((weights @ v).to(dtype))
        norms.append(lse)
    return torch.cat(outs, 2), torch.cat(norms, 2)


def masked_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, mask: T, scale: float, cap: float | None = None
) -> tuple[T, T, T]:
    """Compute the gradients of q, k and v; see ``masked_forward``."""
    dtype = q.dtype
    grad, q, k, v, out = _wide(grad, q, k, v, out)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], _QUERIES):
        at = slice(start, start + _QUERIES)
        weights, _, bent = _masked_weights(q[:, :, at], k, lse[:, :, at], mask[:, :, at], scale, cap)
        dv += weights.mT @ grad[:, :, at]
        inner = (grad[:, :, at] @ v.mT).sub_((grad[:, :, at] * out[:, :, at]).sum(-1, keepdim=True))
        inner.mul_(weights).mul_(scale)
        if bent is not None:
            inner.mul_(bent.square_().neg_().add_(1))
        dq[:, :, at] = inner @ k
        dk += inner.mT @ q[:, :, at]
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


KERNELS = (
    Kernel("flash, CPU", _cpu_takes, _cpu_forward, _cpu_backward),
    Kernel("flash, CUDA", _flash_takes, _flash_forward, _flash_backward),
    Kernel("memory efficient, CUDA", _efficient_takes, _efficient_forward, _efficient_backward),
    Kernel("matrix products", lambda q, k, v: True, _plain_forward, _plain_backward),
)
"""In the order of preference. The last holds the weights of one block of keys in memory."""
