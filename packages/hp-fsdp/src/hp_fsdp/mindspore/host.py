"""Shards on the host: copies to the device before a gather, and back after a reduction.

Note [Optimizers bring parameters back]
    MindSpore computes on the device whatever lives where, so an optimizer's step may leave its result there. What is
    found on the device when parameters are gathered goes home again. On CPU the host is the device, nothing is copied.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from hp_platform import get_platform

__all__ = ["HOST", "on_host", "to_device", "to_host"]

HOST = "CPU"


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is on the host while this process computes on a device."""
    return get_platform().devices.kind != "cpu" and _kind_of(tensor) == HOST


def to_device(tensor: Tensor) -> Tensor:
    """A copy on this process's device; the tensor itself where it is there."""
    device = str(get_platform().devices.current_device()).partition(":")[0]
    return tensor if _kind_of(tensor) == device else tensor.to(device)


def to_host(tensor: Tensor, pin: bool) -> Tensor:
    """A copy on the host; the tensor itself where it is there.

    Args:
        tensor: plain.
        pin: in page-locked memory, where there is a device to copy to.
    """
    if _kind_of(tensor) == HOST:
        return tensor
    copy = tensor.to(HOST)
    return copy.pin_memory() if pin and get_platform().devices.capabilities.pinned_memory else copy


def _kind_of(tensor: Any) -> str:
    return str(tensor.device).partition(":")[0]
