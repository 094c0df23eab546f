"""Fused operators of PyTorch: torch_npu's on an NPU, torch's own elsewhere; the tensors' device decides."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from hp_platform.fused import hidden_shape

_NPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COMPRESSED = 2048  # sides of the mask that stands for any causal one on an NPU


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None,
    layout: str,
) -> torch.Tensor:
    """Attend."""
    if q.device.type == "npu":
        return _npu_attention(q, k, v, causal, float(scale), mask, layout, q.shape[layout.index("N")])
    if layout == "BSND":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    rows, columns = q.shape[2], k.shape[2]
    if causal and rows != columns:  # torch's own begins at the first key
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        causal = False
    if mask is not None and mask.dim() < 2:  # torch's own wants both dims
        mask = mask.expand(rows, columns)
    output = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2) if layout == "BSND" else output


def _npu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None,
    layout: str,
    heads: int,
) -> torch.Tensor:
    _check_dtype("flash_attention", q)
    hidden, mode = None, 0
    if causal:
        hidden, mode = _compressed_mask(q.device), 3
    elif mask is not None:
        sequence = layout.index("S")
        hidden = (~mask).expand(*hidden_shape(mask.shape, q.shape[0], heads, q.shape[sequence], k.shape[sequence]))
    return _torch_npu().npu_fusion_attention(q, k, v, heads, layout, atten_mask=hidden, scale=scale, sparse_mode=mode)[
        0
    ]


@functools.cache
def _compressed_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dims."""
    if x.device.type == "npu":
        _check_dtype("rms_norm", x)
        return _torch_npu().npu_rms_norm(x, weight, epsilon=eps)[0]
    return F.rms_norm(x, list(weight.shape), weight, eps)


def swiglu(gate_and_up: torch.Tensor, dim: int) -> torch.Tensor:
    """Gate one half by the other."""
    if gate_and_up.device.type == "npu":
        _check_dtype("swiglu", gate_and_up)
        return _torch_npu().npu_swiglu(gate_and_up, dim=dim)
    gate, up = gate_and_up.chunk(2, dim)
    return F.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by places."""
    if x.device.type == "npu":
        _check_dtype("rotary", x)
        return _torch_npu().npu_rotary_mul(x, cos, sin, rotary_mode="half")
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _NPU_DTYPES:
        raise TypeError(f"{name} on an NPU takes float16, bfloat16 or float32, got {tensor.dtype}.")


@functools.cache
def _torch_npu() -> Any:
    import torch_npu  # type: ignore[import-not-found]

    return torch_npu
