"""Tensors, models and optimizers of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hp_checkpoint.torch.dtypes import DTYPES
from hp_checkpoint.torch.optimizers import model_state as model_state
from hp_checkpoint.torch.optimizers import optimizer_states as optimizer_states
from hp_dtensor.torch.extend import local_view
from hp_platform import get_platform

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def is_tensor(value: object) -> bool:
    """Tell whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def dtype_of(tensor: torch.Tensor) -> str | None:
    """Return a dtype's name in safetensors, None for one that it lacks."""
    return _NAMES.get(tensor.dtype)


def refusal(tensor: torch.Tensor) -> str | None:
    """Return the reason why a tensor can't be saved or loaded, None where it can."""
    if tensor.is_nested:
        return "is a nested tensor; save its .unbind() parts"
    if type(tensor) not in _PLAIN and getattr(tensor, "_spec", None) is None or _is_foreign(tensor):
        kind = type(tensor)
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, whose layout is not known here; expected a plain tensor or a"
            " DTensor of hp_dtensor"
        )
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; expected a dense tensor"
    if tensor.is_meta:
        return "is on the meta device and has no values; give it memory first, as by hp_dtensor.init_parameters(model)"
    return None


def _is_foreign(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.")


def read_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the local tensor's bytes, row-major: its own memory where that is on the host, else a copy."""
    local = local_view(tensor).resolve_conj().resolve_neg()
    return _bytes(local.cpu().contiguous())


def written_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, Callable[[], None] | None]:
    """Return bytes to write, and a function that brings them into the local tensor; it has a new version."""
    local = local_view(tensor)
    increment_version(local)
    if local.device.type == "cpu" and local.is_contiguous() and not (local.is_conj() or local.is_neg()):
        return _bytes(local), None
    host = local.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()

    def store() -> None:
        local.copy_(host)

    return _bytes(host), store


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for two tensors that are one in memory, and have the same value at any time."""
    if refusal(tensor) is not None:
        return id(tensor)
    local = local_view(tensor)
    place = local.data_ptr()
    signs = local.is_conj(), local.is_neg()
    return (
        (place, local.device, local.dtype, local.shape, local.stride(), tensor.shape, *signs) if place else id(tensor)
    )


def _bytes(local: torch.Tensor) -> np.ndarray:
    return local.reshape(-1).view(torch.uint8).numpy() if local.numel() else np.empty(0, np.uint8)


def empty(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Make a tensor on the host, of a dtype by its name in safetensors."""
    return torch.empty(tuple(shape), dtype=DTYPES[dtype], device="cpu")


def bytes_tensor(array: np.ndarray) -> torch.Tensor:
    """Return bytes as a tensor that the ranks can send."""
    tensor = torch.from_numpy(array)
    devices = get_platform().devices
    return tensor if devices.kind == "cpu" else tensor.to(devices.current_device())


def bytes_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of bytes as an array."""
    return tensor.cpu().numpy()
