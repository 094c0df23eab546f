"""Shards on the host: copies to the device before a gather and back after a reduction, aside from the computation.

Note [Copies aside]
    Copies run on a stream of their own, which first waits for what the computation was given so far, as collectives
    do. So what is gathered ahead of time is copied and gathered while the module before computes, and gradients come
    back while the next ones are computed. On CPU the host is the device, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hp_dtensor import DeviceMesh
from hp_platform import get_platform

__all__ = ["Homecoming", "aside", "empty_on_host", "transport"]

_streams: dict[torch.device, Any] = {}


def transport(mesh: DeviceMesh) -> torch.device:
    """Where this process communicates over ``mesh``."""
    return torch.device("cpu") if mesh.device_type == "cpu" else get_platform().devices.current_device()


def empty_on_host(size: int, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Memory on the host, page-locked where that is wanted and there is a device to copy to."""
    pin = pin and get_platform().devices.capabilities.pinned_memory
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pin)


def aside(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, work goes to the stream for copies, after all that the current one was given; nothing changes on CPU."""
    if device.type == "cpu":
        return nullcontext()
    devices = get_platform().devices
    module = devices.device_module()
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = devices.stream()
    stream.wait_stream(module.current_stream())
    return module.stream(stream)


class Homecoming:
    """A copy from the device to the host under way.

    Args:
        tensor: what to copy; kept until the copy is over.
        pin: see `empty_on_host`.
        then: called with the copy, once it is there.
    """

    def __init__(self, tensor: torch.Tensor, pin: bool, then: Callable[[torch.Tensor], None]) -> None:
        self._tensor = tensor
        self._then = then
        self._copy = empty_on_host(tensor.numel(), tensor.dtype, pin)
        with aside(tensor.device):
            self._copy.copy_(tensor, non_blocking=True)
            devices = get_platform().devices
            self._event = devices.device_module().Event()
            self._event.record()

    def wait(self) -> None:
        """Waits for the copy, and hands it on."""
        self._event.synchronize()
        self._then(self._copy)
