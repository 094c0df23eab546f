"""Fused operators: a device's own where it has them, composed of others elsewhere.

Shapes are in the layout "BSND" (batch, sequence, heads, head size) or "BNSD" (heads before sequence).
"""

from __future__ import annotations

from hp_platform.fused_checks import check_attention, check_rms_norm, check_rotary, check_swiglu
from hp_platform.port import Tensor, port


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    layout: str = "BSND",
) -> Tensor:
    """Attend: softmax(scale * q k^T) v, without the matrix of weights in memory where the device can.

    Args:
        q: queries, in `layout`.
        k: keys; their heads divide the queries' heads, which share them in order.
        v: values, of the keys' heads and length.
        causal: a query sees keys up to its own place; the last query sees all keys.
        scale: of the logits; None is 1 / sqrt(head size).
        mask: bool, true where a query may look, broadcast to (batch, heads, queries, keys); not with `causal`.
        layout: "BSND" or "BNSD".

    Returns:
        What the queries found, in the shape of `q`.

    Raises:
        ValueError: a shape or the layout doesn't fit, or both `causal` and `mask`.
        TypeError: the dtypes differ, or the device's operator doesn't have them (PyTorch on an NPU has float16,
            bfloat16 and float32, MindSpore on Ascend float16 and bfloat16).
    """
    check_attention(q, k, v, causal=causal, mask=mask, layout=layout)
    scale = float(q.shape[3] ** -0.5) if scale is None else float(scale)
    return port().fused.flash_attention(q, k, v, causal, scale, mask, layout)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise the last dims, those of the weight: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: any shape that ends with the weight's.
        weight: the scale.
        eps: added to the mean of the squares.

    Raises:
        ValueError: the shapes don't fit.
        TypeError: the device's operator doesn't have the dtype.
    """
    check_rms_norm(x.shape, weight.shape)
    return port().fused.rms_norm(x, weight, eps)


def swiglu(gate_and_up: Tensor, dim: int = -1) -> Tensor:
    """Gate: silu(a) * b for the halves a, b of a dim.

    Args:
        gate_and_up: the gate and what it lets through, one after the other.
        dim: the dim that they share.

    Raises:
        ValueError: the dim has no two halves.
        TypeError: the device's operator doesn't have the dtype.
    """
    check_swiglu(gate_and_up.shape, dim)
    return port().fused.swiglu(gate_and_up, dim)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their places: x * cos + (-x2, x1) * sin for the halves x1, x2 of the last dim.

    Args:
        q: 4 dims, the last the head size.
        k: as `q`.
        cos: 4 dims that broadcast to q and k, such as (1, sequence, 1, head size).
        sin: as `cos`.

    Returns:
        The rotated queries and keys.

    Raises:
        ValueError: the shapes don't fit.
        TypeError: the device's operator doesn't have the dtype.
    """
    check_rotary(q.shape, k.shape, cos.shape, sin.shape)
    rotate = port().fused.rotary
    return rotate(q, cos, sin), rotate(k, cos, sin)
