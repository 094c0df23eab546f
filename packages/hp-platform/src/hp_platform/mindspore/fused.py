"""Fused operators of MindSpore: its own where the device has them (Ascend), plain math elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hp_platform.devices import devices
from hp_platform.fused import hidden_shape

_HALVES = (mindspore.float16, mindspore.bfloat16)
_FLOATS = (*_HALVES, mindspore.float32)
_LOWEST = {
    mindspore.float16: -6.0e4,
    mindspore.bfloat16: -3.0e38,
    mindspore.float32: -3.0e38,
    mindspore.float64: -3.0e38,
}
_COMPRESSED = 2048  # sides of the mask that stands for any causal one on Ascend


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None,
    layout: str,
) -> Tensor:
    """Attend."""
    if devices.capabilities.fused_operators:
        return _ascend_attention(q, k, v, causal, scale, mask, layout)
    if layout == "BSND":
        q, k, v = (mint.transpose(tensor, 1, 2) for tensor in (q, k, v))
    k, v = (_repeat_heads(tensor, q.shape[1]) for tensor in (k, v))
    logits = mint.matmul(q, mint.transpose(k, 2, 3)) * scale
    if causal:
        rows, columns = q.shape[2], k.shape[2]
        mask = Tensor(np.tri(rows, columns, columns - rows, dtype=bool))
    if mask is not None:  # not -inf: on the CPU a row of it spoils its neighbours
        logits = mint.where(mask, logits, Tensor(_LOWEST[logits.dtype], logits.dtype))
    weights = mint.nn.functional.softmax(logits, -1)
    if mask is not None:
        weights = mint.where(mask, weights, Tensor(0.0, weights.dtype))  # a query that sees nothing finds zeros
    output = mint.matmul(weights, v)
    return mint.transpose(output, 1, 2) if layout == "BSND" else output


def _ascend_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None, layout: str
) -> Tensor:
    _check_dtype("flash_attention", q, _HALVES)
    hidden, mode = None, 0
    if causal:
        hidden, mode = _compressed_mask(), 3
    elif mask is not None:
        heads, sequence = layout.index("N"), layout.index("S")
        shape = hidden_shape(mask.shape, q.shape[0], q.shape[heads], q.shape[sequence], k.shape[sequence])
        hidden = mint.broadcast_to(mint.logical_not(mask), shape)
    return ops.flash_attention_score(
        q,
        k,
        v,
        q.shape[layout.index("N")],
        attn_mask=hidden,
        scalar_value=scale,
        input_layout=layout,
        sparse_mode=mode,
    )


@functools.cache
def _compressed_mask() -> Tensor:
    return Tensor(~np.tri(_COMPRESSED, dtype=bool))


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    batch, kv_heads, length, size = x.shape
    if kv_heads == heads:
        return x
    repeated = mint.broadcast_to(
        x.reshape(batch, kv_heads, 1, length, size), (batch, kv_heads, heads // kv_heads, length, size)
    )
    return repeated.reshape(batch, heads, length, size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dims."""
    if devices.capabilities.fused_operators:
        _check_dtype("rms_norm", x, _FLOATS)
        return ops.rms_norm(x, weight, eps)[0]
    dims = tuple(range(-len(weight.shape), 0))
    exact = x.astype(mindspore.float32) if x.dtype in _HALVES else x
    normed = exact * mint.rsqrt(mint.mean(exact * exact, dims, True) + eps) * weight.astype(exact.dtype)
    return normed.astype(x.dtype)


def swiglu(gate_and_up: Tensor, dim: int) -> Tensor:
    """Gate one half by the other."""
    if devices.capabilities.fused_operators:
        _check_dtype("swiglu", gate_and_up, _FLOATS)
        return ops.swiglu(gate_and_up, dim)
    gate, up = mint.chunk(gate_and_up, 2, dim)
    return mint.nn.functional.silu(gate) * up


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by places."""
    if devices.capabilities.fused_operators:
        _check_dtype("rotary", x, _FLOATS)
        return ops.rotary_position_embedding(x, cos, sin)
    first, second = mint.chunk(x, 2, -1)
    return x * cos + mint.cat((-second, first), -1) * sin


def _check_dtype(name: str, tensor: Any, dtypes: tuple[Any, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} on Ascend takes {', '.join(str(each).lower() for each in dtypes)}, got {tensor.dtype}."
        )
