"""Tensors of MindSpore."""

from __future__ import annotations

from mindspore import Tensor, ops


def is_floating(tensor: Tensor) -> bool:
    """Tell whether the tensor's dtype is floating-point."""
    return tensor.is_floating_point()


def copy(tensor: Tensor) -> Tensor:
    """Copy a tensor's values to one of its own memory, without its history."""
    return ops.stop_gradient(tensor).copy()
