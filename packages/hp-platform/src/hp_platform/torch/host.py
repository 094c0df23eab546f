"""Memory of the host, from which a device copies and to which it copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hp_platform.devices import devices

host_observers: list[Callable[[torch.Tensor], None]] = []
"""Are told of each tensor that `empty_on_host` returns."""


def empty_on_host(size: int, dtype: torch.dtype, *, pin: bool = True, from_host: bool = False) -> torch.Tensor:
    """Allocate memory of the host, which dispatch modes do not see.

    Args:
        size: number of elements.
        dtype: of them.
        pin: page-locked, where the device copies from such memory beside the computation.
        from_host: for copies of tensors that are on the CPU whatever the device, which is never page-locked.
    """
    device = torch.device("cpu") if from_host else devices.host_device()
    with _disable_current_modes():
        pinned = pin and not from_host and devices.capabilities.pinned_memory
        memory = torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
    for observer in host_observers:
        observer(memory)
    return memory
