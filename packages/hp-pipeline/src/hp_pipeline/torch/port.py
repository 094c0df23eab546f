"""Tensors of PyTorch."""

from __future__ import annotations

import torch


def is_floating(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's dtype is floating-point."""
    return tensor.is_floating_point()


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's values to one of its own memory, without its history."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
