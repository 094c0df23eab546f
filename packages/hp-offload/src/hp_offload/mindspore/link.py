"""Copies between MindSpore's tensors and the host's memory, done when the call returns.

A storage is a contiguous tensor here, then the bytes of one: MindSpore makes no tensor of a part of some memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from hp_offload.port import ALIGNMENT


def streams() -> tuple[None, None]:
    """Have no streams: copies are done at once."""
    return None, None


def storage(tensor: Tensor) -> Tensor:
    """Get what is copied: the tensor."""
    return tensor


def address(storage: Tensor) -> int:
    """Tell memory apart by where it begins and how long it is; 0 where there is none."""
    return (storage.data_ptr() << 48 | storage.nbytes) if storage.nbytes else 0


def nbytes(storage: Tensor) -> int:
    """Count a tensor's bytes."""
    return storage.nbytes


def host(nbytes: int) -> np.ndarray:
    """Allocate memory of the host."""
    return np.empty(nbytes, np.uint8)


def copy_out(storages: list[Tensor], buffer: np.ndarray, stream: None, after: None) -> None:
    """Copy tensors to a buffer, one after the other."""
    offset = 0
    for each in storages:
        values = np.ascontiguousarray(each.asnumpy()).reshape(-1).view(np.uint8)
        buffer[offset : offset + values.size] = values
        offset += -(-values.size // ALIGNMENT) * ALIGNMENT


def copy_back(buffer: np.ndarray, nbytes: int, like: Any, stream: None) -> tuple[np.ndarray, None]:
    """Copy a buffer's first bytes."""
    return buffer[:nbytes].copy(), None


def empty_like(storage: Tensor) -> None:
    """Need nothing: bytes come back as bytes."""


def free(storage: Tensor) -> None:
    """Refuse: tensors that the caller holds stay where they are."""
    raise NotImplementedError(
        "SwapManager.add_storage is not supported on MindSpore: a tensor that its caller holds cannot be freed. Use"
        " swap(function, ...), whose saved tensors nobody else holds."
    )


def fill(storage: Tensor, buffer: np.ndarray, nbytes: int, stream: None) -> None:
    """Refuse, as `free`."""
    free(storage)


def wait(event: None) -> None:
    """Wait for nothing: copies are done."""
