"""What the ranks run on: the framework and the device of `--backend`."""

from __future__ import annotations

import os

TARGETS = ("torch-cpu", "torch-cuda", "torch-npu")
_DEVICE = "HYPER_PARALLEL_DEVICE"
_PLATFORM = "HYPER_PARALLEL_PLATFORM"


def select(target: str) -> None:
    """Choose the framework and device of this process and all it starts.

    Args:
        target: one of TARGETS.
    """
    os.environ[_PLATFORM], os.environ[_DEVICE] = target.split("-", 1)


def device_type() -> str:
    """Name the kind of device that tests put their tensors on: "cpu", "cuda" or "npu".

    The same in the process that runs pytest and in the ranks.
    """
    selected = os.environ.get(_DEVICE)
    if selected:
        return selected
    from hp_platform.platform import get_platform

    return get_platform().devices.kind


def missing() -> str | None:
    """Say what the selected device needs and this machine lacks, None if nothing."""
    kind = os.environ.get(_DEVICE, "cpu")
    if kind == "cpu":
        return None
    from hp_platform.platform import get_platform

    platform = get_platform()
    present = platform.devices.present()
    if kind in present:
        return None
    return f"--backend {platform.name}-{kind} needs a device of kind {kind}, this machine has: {', '.join(present)}"
