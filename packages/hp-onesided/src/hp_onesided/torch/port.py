"""Tensors of PyTorch in the host's memory, by their addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from hp_onesided.planning.headers import DTYPES
from hp_platform.torch.internals import torch_dispatches_above

_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_WIDE = {"bfloat16": torch.float32, "float16": torch.float32}
_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors without a meaning of their own."""
_ANY = ctypes.c_char * 2**46  # one type for memory of all sizes: ctypes keeps each type that was made


def limit(group: torch.distributed.ProcessGroup) -> float | None:
    cpu = torch.device("cpu")
    if cpu not in group._device_types or (backend := group._get_backend(cpu)).name() != "gloo":
        return None
    return backend.options._timeout.total_seconds()


def dtype(tensor: torch.Tensor) -> str | None:
    return stored_dtype(tensor) if is_plain(tensor) and not _keeps_results() else None


def stored_dtype(tensor: torch.Tensor) -> str | None:
    return _NAMES.get(tensor.dtype) if tensor.is_cpu else None


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and not tensor.is_conj() and not tensor.is_neg()


def _keeps_results() -> bool:
    """Tell whether selective checkpointing runs, on all ranks alike: it hands back what a backend's operators gave."""
    if not torch_dispatches_above():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def width(dtype: torch.dtype) -> int:
    return dtype.itemsize


def view(memory: Any, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def seen(name: str) -> torch.autograd.profiler.record_function | None:
    return torch.autograd.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else None


def empty(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.new_empty(count)


def arranged(tensor: torch.Tensor, order: Sequence[int] | None, count: int) -> torch.Tensor:
    flat = tensor.data.view(-1)  # what is written to it, autograd does not see, as it does not see what gloo writes
    if order is not None:
        return flat.view(len(order), -1)[list(order)].view(-1)
    return flat if flat.numel() == count else torch.nn.functional.pad(flat, (0, count - flat.numel()))


def land(output: torch.Tensor, values: torch.Tensor, order: Sequence[int] | None) -> None:
    flat = output.data.view(-1)
    if order is not None:
        values = values.view(len(order), -1)[list(order)].view(-1)
    if values.data_ptr() != flat.data_ptr():
        flat.copy_(values[: flat.numel()])


def divide(tensor: torch.Tensor, size: int) -> None:
    tensor.div_(size)


def reduce(target: int, parts: Sequence[int], nbytes: int, dtype: str, op: str) -> None:
    stored = getattr(torch, dtype)
    count = nbytes // stored.itemsize
    out = _at(target, stored, count)
    first, second, *others = (_at(part, stored, count) for part in parts)
    combine, wide = _COMBINE[op], _WIDE.get(dtype, stored)
    total = out if wide is stored and target not in parts[2:] else torch.empty(count, dtype=wide)
    with torch.no_grad():
        combine(first.to(wide), second.to(wide), out=total)
        for other in others:
            combine(total, other.to(wide), out=total)
        if op == "avg":
            total.div_(len(parts))
        if total is not out:
            out.copy_(total)


def _at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer(_ANY.from_address(address), dtype=dtype, count=count)
