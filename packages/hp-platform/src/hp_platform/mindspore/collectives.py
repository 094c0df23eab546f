"""Collectives on MindSpore: native ones on hccl, those of mccl completed by emulation on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_platform.devices import devices
from hp_platform.mindspore import emulation, native
from hp_platform.port import Handle

# How many collectives this process has issued in each group; send and recv, which two ranks issue, are none.
issued: Counter[str] = Counter()


def _backend() -> ModuleType:
    return native if devices.capabilities.native_collectives else emulation


def all_reduce(tensor: Any, op: str, group: str, async_op: bool) -> Handle | None:
    """Reduce in place."""
    issued[group] += 1
    return _backend().all_reduce(tensor, op, group, async_op)


def all_gather(output: Any, tensor: Any, group: str, async_op: bool) -> Handle | None:
    """Concatenate each rank's tensor."""
    issued[group] += 1
    return _backend().all_gather(output, tensor, group, async_op)


def reduce_scatter(output: Any, tensor: Any, op: str, group: str, async_op: bool) -> Handle | None:
    """Reduce and keep this rank's piece."""
    issued[group] += 1
    return _backend().reduce_scatter(output, tensor, op, group, async_op)


def all_to_all(
    output: Any, tensor: Any, received: list[int], sent: list[int], group: str, async_op: bool
) -> Handle | None:
    """Exchange rows."""
    issued[group] += 1
    return _backend().all_to_all(output, tensor, received, sent, group, async_op)


def broadcast(tensor: Any, group_src: int, group: str, async_op: bool) -> Handle | None:
    """Copy from one rank."""
    issued[group] += 1
    return _backend().broadcast(tensor, group_src, group, async_op)


def send(tensor: Any, dst: int, group: str, tag: int, async_op: bool) -> Handle | None:
    """Send to one rank."""
    return _backend().send(tensor, dst, group, tag, async_op)


def recv(tensor: Any, src: int, group: str, tag: int, async_op: bool) -> Handle | None:
    """Receive from one rank."""
    return _backend().recv(tensor, src, group, tag, async_op)


def has_tags(group: str, device: Any) -> bool:
    """Tell whether messages have tags; those of hccl have none."""
    return not devices.capabilities.native_collectives


def receives_ahead(group: str, device: Any) -> bool:
    """Tell whether receives may be posted ahead; on hccl one may hold the host until its message comes."""
    return not devices.capabilities.native_collectives


def barrier(group: str) -> None:
    """Wait for all ranks."""
    issued[group] += 1
    _backend().barrier(group)


def from_bytes(data: bytes, group: str) -> Tensor:
    """Make a tensor of bytes."""
    return Tensor(np.frombuffer(data, np.uint8).copy())


def to_bytes(tensor: Tensor) -> bytes:
    """Return its bytes."""
    return tensor.asnumpy().tobytes()


def from_numbers(numbers: Sequence[int | float], group: str) -> Tensor:
    """Make a tensor of numbers."""
    return Tensor(np.array(numbers, np.float64 if any(isinstance(each, float) for each in numbers) else np.int64))


def to_numbers(tensor: Tensor) -> list[Any]:
    """Return its numbers."""
    return tensor.asnumpy().tolist()


def averages(tensor: Any, group: str) -> bool:
    """Tell whether the backend averages by itself; both do."""
    return True


def divide(tensor: Any, size: int) -> None:
    """Divide in place; not called, since the backends average."""
    raise AssertionError("every backend of MindSpore averages")


def pending(work: Handle, kind: str, group: str) -> Handle:
    """Hand the backend's own handle on."""
    return work


def raise_if_lost(error: RuntimeError, kind: str, group: str) -> None:
    """Do nothing: MindSpore's backends were not seen to report a lost rank."""
