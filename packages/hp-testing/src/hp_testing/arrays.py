"""Tensors of the platform in use from arrays and back, so that one test serves every framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hp_platform.platforms.ports import platform_name

if TYPE_CHECKING:
    import numpy as np


def as_tensor(array: Any, dtype: str | None = None) -> Any:
    """Make a tensor on the device in use.

    Args:
        array: an array, or what makes one.
        dtype: by its name, such as "bfloat16"; None keeps the array's.
    """
    import numpy as np

    values = np.asarray(array)
    return _arrays().as_tensor(values, dtype or values.dtype.name)


def as_array(tensor: Any) -> np.ndarray:
    """Copy a tensor's values to an array; bfloat16, which NumPy lacks, becomes float32."""
    return _arrays().as_array(tensor)


def _arrays() -> Any:
    return importlib.import_module(f"hp_testing.{platform_name()}.arrays")
