"""What fused operators accept: checks of shapes and dtypes, one text of an error for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LAYOUTS = ("BSND", "BNSD")


def check_attention(q: Any, k: Any, v: Any, *, causal: bool, masked: bool, layout: str) -> None:
    """Check the arguments of `flash_attention`.

    Args:
        q: its queries.
        k: its keys.
        v: its values.
        causal: its `causal`.
        masked: whether it has a mask.
        layout: its `layout`.

    Raises:
        ValueError: a shape or the layout doesn't fit, or both `causal` and a mask.
        TypeError: the dtypes differ.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown: choose one of {', '.join(LAYOUTS)}.")
    heads = layout.index("N")
    a, b, c = (tuple(tensor.shape) for tensor in (q, k, v))
    shapes = f"q {a}, k {b}, v {c} in layout {layout}"
    if not len(a) == len(b) == len(c) == 4 or a[0] != b[0] or a[3] != b[3]:
        raise ValueError(f"flash_attention needs 4 dims, one batch and one head size, got {shapes}.")
    if b[:3] != c[:3] or a[heads] % b[heads]:
        raise ValueError(f"flash_attention needs v as long as k, and heads of q that divide over k's, got {shapes}.")
    if causal and masked:
        raise ValueError("flash_attention takes causal=True or a mask: put the causal part into the mask.")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"flash_attention needs one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}.")


def check_rms_norm(x: Sequence[int], weight: Sequence[int]) -> None:
    """Check the shapes of `rms_norm`.

    Raises:
        ValueError: they don't fit.
    """
    if not weight or tuple(x[len(x) - len(weight) :]) != tuple(weight):
        raise ValueError(f"rms_norm: weight of shape {tuple(weight)} is not the last dims of {tuple(x)}.")


def check_swiglu(shape: Sequence[int], dim: int) -> None:
    """Check the shape of `swiglu`.

    Raises:
        ValueError: the dim has no two halves.
    """
    if shape[dim] % 2:
        raise ValueError(f"swiglu: dim {dim} of shape {tuple(shape)} has no two halves.")


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
