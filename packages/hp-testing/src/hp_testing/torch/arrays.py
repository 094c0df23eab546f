"""Tensors of arrays and back, for tests that are the same on every platform."""

from __future__ import annotations

import numpy as np
import torch

from hp_platform.devices import devices


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Make a tensor with an array's values on the device in use."""
    return torch.tensor(np.asarray(array), device=devices.current_device()).to(getattr(torch, dtype))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor's values to an array; bfloat16, which NumPy lacks, becomes float32."""
    values = tensor.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy().copy()
