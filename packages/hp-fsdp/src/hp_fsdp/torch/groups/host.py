"""Shards on the host: copies to the device before a gather and back after a reduction, beside the computation.

Note [Copy stream]
    Copies run on a stream of their own, which first waits for the work issued so far on the current stream, as
    collectives do. So gathers ahead of time are copied and gathered while the previous module computes, and gradients
    come back while the next ones are computed. On CPU the host is the device, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hp_dtensor import DeviceMesh
from hp_fsdp.options import CopyLink
from hp_platform import collectives, get_platform

_streams: dict[torch.device, Any] = {}


def transport(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this process communicates over ``mesh``."""
    return torch.device("cpu") if mesh.device_type == "cpu" else get_platform().devices.current_device()


def empty_on_host(size: int, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """Allocate memory on the host, page-locked if ``pin`` and there is a device to copy to."""
    pin = pin and get_platform().devices.capabilities.pinned_memory
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pin)


def on_copy_stream(
    device: torch.device, link: CopyLink | None = None, *, out: bool = False
) -> AbstractContextManager[Any]:
    """Issue work on the copy stream, after the work of the current stream: Note [Copy stream]. No effect on CPU.

    Args:
        device: of the copies.
        link: whose streams to use; None uses this package's own.
        out: the copies go to the host.
    """
    if device.type == "cpu":
        return nullcontext()
    devices = get_platform().devices
    module = devices.device_module()
    stream = _streams.get(device) if link is None else link.streams[0 if out else 1]
    if stream is None:
        stream = _streams[device] = devices.stream()
    stream.wait_stream(module.current_stream())
    return module.stream(stream)


class D2HCopy:
    """A copy from the device to the host under way.

    Args:
        tensor: the source; kept until the copy is over.
        pin: see `empty_on_host`.
        then: called with the copy when it is done.
        link: see `on_copy_stream`.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        pin: bool,
        then: Callable[[torch.Tensor], None],
        link: CopyLink | None = None,
    ) -> None:
        self._tensor = tensor
        self._then = then
        self._copy = empty_on_host(tensor.numel(), tensor.dtype, pin)
        with on_copy_stream(tensor.device, link, out=True):
            self._copy.copy_(tensor, non_blocking=True)
            devices = get_platform().devices
            self._event = devices.device_module().Event()
            self._event.record()

    def wait(self) -> None:
        """Wait for the copy, and call ``then``."""
        self._event.synchronize()
        self._then(self._copy)


def largest(numbers: Sequence[int], mesh: DeviceMesh, groups: Sequence[Any]) -> list[int]:
    """Return the largest of the ranks' numbers, element by element; wait for all ranks of the groups."""
    tensor = torch.tensor(list(numbers), device=transport(mesh))
    for group in groups:
        collectives.all_reduce(tensor, "max", group=group)
    return tensor.tolist()
