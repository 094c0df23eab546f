"""Fused operators: a device's own where it has them, composed of others elsewhere.

Shapes are in the layout "BSND" (batch, sequence, heads, head size) or "BNSD" (heads before sequence).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


LAYOUTS = ("BSND", "BNSD")


def check_attention(q: Any, k: Any, v: Any, *, causal: bool, mask: Any, layout: str) -> None:
    """Check the arguments of `flash_attention`.

    Args:
        q: its queries.
        k: its keys.
        v: its values.
        causal: its `causal`.
        mask: its `mask`.
        layout: its `layout`.

    Raises:
        ValueError: a shape or the layout doesn't fit, or both `causal` and a mask.
        TypeError: the dtypes differ, or the mask is not bool.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"Unknown layout {layout!r}; expected one of {', '.join(LAYOUTS)}.")
    heads = layout.index("N")
    a, b, c = (tuple(tensor.shape) for tensor in (q, k, v))
    shapes = f"q {a}, k {b}, v {c} in layout {layout}"
    if not len(a) == len(b) == len(c) == 4 or a[0] != b[0] or a[3] != b[3]:
        raise ValueError(f"flash_attention needs 4 dims and equal batch and head sizes, got {shapes}.")
    if b[:3] != c[:3] or a[heads] % b[heads]:
        raise ValueError(
            f"flash_attention needs k and v of equal length and heads, and q heads divisible by k's, got {shapes}."
        )
    if causal and mask is not None:
        raise ValueError("flash_attention takes causal=True or a mask, not both: include causality in the mask.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"flash_attention needs q, k and v of one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}.")
    if mask is None:
        return
    if str(mask.dtype).rpartition(".")[2].lower() != "bool":
        raise TypeError(f"flash_attention needs a bool mask, True where a query may attend, got {mask.dtype}.")
    sequence = layout.index("S")
    full = (a[0], a[heads], a[sequence], b[sequence])
    shape = tuple(mask.shape)
    if len(shape) > 4 or any(have not in (1, want) for have, want in zip(reversed(shape), reversed(full))):
        raise ValueError(f"flash_attention: mask of shape {shape} does not broadcast to {full}.")


def hidden_shape(mask: Sequence[int], batch: int, heads: int, rows: int, columns: int) -> tuple[int, ...]:
    """Get the shape that Ascend takes a mask in: it repeats over the batch and the heads alone, all or none of them.

    Args:
        mask: the mask's shape, which broadcasts to (batch, heads, rows, columns).
        batch: of the queries.
        heads: of the queries.
        rows: number of queries.
        columns: number of keys.
    """
    if len(mask) <= 2:
        return rows, columns
    return batch, heads if mask[-3] != 1 else 1, rows, columns


def check_rms_norm(x: Sequence[int], weight: Sequence[int]) -> None:
    """Check the shapes of `rms_norm`.

    Raises:
        ValueError: they don't fit.
    """
    if not weight or tuple(x[len(x) - len(weight) :]) != tuple(weight):
        raise ValueError(f"rms_norm: weight of shape {tuple(weight)} must equal the last dims of x, {tuple(x)}.")


def check_swiglu(shape: Sequence[int], dim: int) -> None:
    """Check the shape of `swiglu`.

    Raises:
        ValueError: there is no such dim, or it has no two halves.
    """
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"swiglu: dim {dim} is out of range for shape {tuple(shape)}.")
    if shape[dim] % 2:
        raise ValueError(f"swiglu: dim {dim} of shape {tuple(shape)} has an odd size and cannot be halved.")


def check_rotary(q: Sequence[int], k: Sequence[int], cos: Sequence[int], sin: Sequence[int]) -> None:
    """Check the shapes of `rotary`.

    Raises:
        ValueError: they don't fit.
    """
    for name, x in (("q", q), ("k", k)):
        fits = all(
            len(table) == len(x) == 4 and all(a in (1, b) for a, b in zip(table, x)) and table[3] == x[3]
            for table in (cos, sin)
        )
        if not fits or x[3] % 2:
            raise ValueError(
                f"rotary: {name} of shape {tuple(x)} needs 4 dims with an even head size, and cos and sin that "
                f"broadcast to it, got {tuple(cos)} and {tuple(sin)}."
            )
