"""Copies between a device of PyTorch and the host's memory, on side streams where the device has them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hp_offload.port import ALIGNMENT
from hp_platform import get_platform

Storage = torch.UntypedStorage
Stream = Any
Event = Any


def streams() -> tuple[Stream | None, Stream | None]:
    """Make the streams of copies to the host and to the device; None on CPU, where a copy is done at once."""
    devices = get_platform().devices
    if not devices.capabilities.streams:
        return None, None
    return devices.stream(), devices.stream()


def storage(tensor: torch.Tensor | Storage) -> Storage:
    """Get the memory that a tensor is a view of."""
    return tensor if isinstance(tensor, Storage) else tensor.untyped_storage()


def address(storage: Storage) -> int:
    """Get where memory begins; 0 where there is none."""
    return 0 if storage.device.type == "meta" else storage.data_ptr()


def nbytes(storage: Storage) -> int:
    """Count a storage's bytes."""
    return storage.nbytes()


def host(nbytes: int) -> torch.Tensor:
    """Allocate memory of the host."""
    with _disable_current_modes():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=get_platform().devices.capabilities.pinned_memory)


def copy_out(storages: list[Storage], buffer: torch.Tensor, stream: Stream | None, after: Event) -> Event:
    """Copy storages to a buffer on a stream that begins with what is computed up to here."""
    with _disable_current_modes(), torch.no_grad():
        if stream is None or storages[0].device.type == "cpu":
            _copy_out(storages, buffer)
            return None
        stream.wait_stream(torch.get_device_module(storages[0].device.type).current_stream(storages[0].device))
        if after is not None:
            stream.wait_event(after)
        with stream:
            _copy_out(storages, buffer)
        return stream.record_event()


def _copy_out(storages: list[Storage], buffer: torch.Tensor) -> None:
    if len(storages) == 1:
        buffer.copy_(_bytes(storages[0]), non_blocking=True)
        return
    flat = torch.empty(buffer.numel(), dtype=torch.uint8, device=storages[0].device)
    offset = 0
    for each in storages:
        flat[offset : offset + each.nbytes()].copy_(_bytes(each))
        offset += -(-each.nbytes() // ALIGNMENT) * ALIGNMENT
    buffer.copy_(flat, non_blocking=True)


def copy_back(buffer: torch.Tensor, nbytes: int, like: Storage, stream: Stream | None) -> tuple[Storage, Event]:
    """Copy a buffer's first bytes to new memory on a device."""
    with torch.no_grad():
        new = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
    return new.untyped_storage(), _copy_back(new, buffer[:nbytes], stream)


def empty_like(storage: Storage) -> Storage:
    """Return a storage of no bytes on the same device."""
    return torch.UntypedStorage(0, device=storage.device)


def free(storage: Storage) -> None:
    """Give a storage's memory back."""
    storage.resize_(0)


def fill(storage: Storage, buffer: torch.Tensor, nbytes: int, stream: Stream | None) -> Event:
    """Give a storage its memory and its bytes back."""
    storage.resize_(nbytes)
    return _copy_back(_bytes(storage), buffer[:nbytes], stream)


def _copy_back(new: torch.Tensor, buffer: torch.Tensor, stream: Stream | None) -> Event:
    with _disable_current_modes(), torch.no_grad():
        if stream is None or new.device.type == "cpu":
            new.copy_(buffer)
            return None
        # The memory is that of the current stream, where what was in it before may still be used.
        stream.wait_stream(torch.get_device_module(new.device.type).current_stream(new.device))
        with stream:
            new.copy_(buffer, non_blocking=True)
        return stream.record_event()


def wait(event: Event) -> None:
    """Make the current stream wait for a copy."""
    if event is not None:
        event.wait()


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
