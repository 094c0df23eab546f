"""What backends can't move, as what they can: the same bytes under another dtype."""

from __future__ import annotations

import torch

__all__ = ["MOVED_AS", "movable", "real"]

real = torch.view_as_real  # backends know no complex numbers

# What gloo can't move, as what it can. Complex numbers are apart: their real view has a dim more.
MOVED_AS = {
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


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of such a dtype as what is moved.

    Args:
        tensor: contiguous, of a dtype in MOVED_AS.
    """
    return real(tensor) if tensor.is_complex() else tensor.view(MOVED_AS[tensor.dtype])
