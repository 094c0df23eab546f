"""Conversions between the floating-point dtypes of safetensors, of bytes; no framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_checkpoint.disk.files import DTYPES

FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CHUNK = 1 << 20  # elements at a time


def name_of_dtype(dtype: Any) -> str:
    """Return the name of a framework's dtype, or of one that is named already.

    >>> name_of_dtype("bfloat16")
    'bfloat16'
    """
    return str(dtype).rpartition(".")[2].lower()  # torch.bfloat16, Float16


def dtype_named(name: str) -> str:
    """Return a floating-point dtype by its name, as "bfloat16".

    Raises:
        ValueError: it is none to convert to.
    """
    if name not in _NAMES:
        raise ValueError(f"dtype {name!r} is none to convert to; expected one of {', '.join(_NAMES)}")
    return _NAMES[name]


def converts(source: str, target: str) -> bool:
    """Tell whether a dtype is converted to another one, by their names in safetensors."""
    return {source, target} <= {*FLOATS, "BF16"}


def casts_to(name: str, source: str, target: str) -> bool:
    """Tell whether a tensor is converted where floating-point ones are asked for in another dtype.

    Raises:
        ValueError: it has numbers of eight bits, which have scales beside them.
    """
    if source.startswith("F8"):
        raise ValueError(f"{name!r} is {source}, which is not converted: its scales are other tensors")
    return source != target and converts(source, target)


def converted(data: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert elements as ``tensor.to(dtype)`` of the frameworks does: to the nearest number, to the even one of two.

    Args:
        data: bytes of the elements.
        source: their dtype, by its name in safetensors.
        target: the one to convert to.
    """
    if source == target:
        return data
    count = len(data) // DTYPES[source]
    result = np.empty(count * DTYPES[target], np.uint8)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        values = _decoded(data[start * DTYPES[source] : stop * DTYPES[source]], source)
        result[start * DTYPES[target] : stop * DTYPES[target]] = _encoded(values, target)
    return result


def _decoded(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (_aligned(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _aligned(data, FLOATS[dtype])


def _encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "BF16":
            return values.astype(FLOATS[dtype]).view(np.uint8)
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16).view(np.uint8)


def _aligned(data: np.ndarray, dtype: type) -> np.ndarray:
    data = np.ascontiguousarray(data)
    return data.view(dtype) if data.ctypes.data % np.dtype(dtype).itemsize == 0 else data.copy().view(dtype)
