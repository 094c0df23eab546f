"""Dtypes on the wire: tensors of dtypes that a backend cannot send, viewed as same-width dtypes that it can."""

from __future__ import annotations

import torch

real = torch.view_as_real  # backends know no complex numbers

# Dtypes that gloo cannot send, and the dtype to send instead; None is for complex numbers, sent as their real view.
SENT_AS = {
    getattr(torch, name): as_dtype
    for as_dtype, names in {
        torch.uint8: ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        torch.float16: ("int16", "uint16"),
        torch.int32: ("uint32",),
        torch.int64: ("uint64",),
        None: ("complex32", "complex64", "complex128"),
    }.items()
    for name in names
    if hasattr(torch, name)
}


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as the dtype that is sent.

    Args:
        tensor: contiguous, of a dtype in SENT_AS.
    """
    return real(tensor) if tensor.is_complex() else tensor.view(SENT_AS[tensor.dtype])
