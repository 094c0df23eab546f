"""Tensors of arrays and back, for tests that are the same on every platform."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np


def as_tensor(array: np.ndarray, dtype: str) -> Any:
    """Make a tensor with an array's values on the device in use."""
    return mindspore.Tensor(np.asarray(array)).astype(getattr(mindspore, "bool_" if dtype == "bool" else dtype))


def as_array(tensor: Any) -> np.ndarray:
    """Copy a tensor's values to an array; bfloat16, which NumPy lacks, becomes float32."""
    values = tensor.astype(mindspore.float32) if tensor.dtype is mindspore.bfloat16 else tensor
    return values.asnumpy().copy()
