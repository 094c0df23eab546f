"""Shards on the host: copies to the device before a gather, and back after a reduction.

Note [Optimizers bring parameters back]
    MindSpore computes on the device wherever tensors live, so an optimizer's step may leave its result there. Shards
    on the device are moved back to the host before a gather. On CPU the host is the device, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, _no_grad

from hp_dtensor import DeviceMesh
from hp_dtensor.mindspore.extend import local_mode
from hp_platform import get_platform

HOST = "CPU"


def on_host(tensor: Tensor) -> bool:
    """Tell whether a tensor is on the host while this process computes on a device."""
    return get_platform().devices.kind != "cpu" and _kind_of(tensor) == HOST


def to_device(tensor: Tensor) -> Tensor:
    """Copy to this process's device; return the tensor itself if it is there."""
    device = str(get_platform().devices.current_device()).partition(":")[0]
    return tensor if _kind_of(tensor) == device else tensor.to(device)


def to_host(tensor: Tensor, pin: bool) -> Tensor:
    """Copy to the host; return the tensor itself if it is there.

    Args:
        tensor: plain.
        pin: use page-locked memory if there is a device to copy to.
    """
    if _kind_of(tensor) == HOST:
        return tensor
    copy = tensor.to(HOST)
    return copy.pin_memory() if pin and get_platform().devices.capabilities.pinned_memory else copy


def _kind_of(tensor: Any) -> str:
    return str(tensor.device).partition(":")[0]


def largest(numbers: Sequence[int], mesh: DeviceMesh, groups: Sequence[Any]) -> list[int]:
    """Return the largest of the ranks' numbers, element by element; wait for all ranks of the groups."""
    with _no_grad(), local_mode():
        tensor = Tensor(np.array(numbers, np.int64))
        for group in groups:
            get_platform().collectives.all_reduce(tensor, "max", group=group)
        return tensor.asnumpy().tolist()
