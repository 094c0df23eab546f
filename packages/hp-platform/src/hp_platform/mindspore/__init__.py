"""The MindSpore platform: hccl process groups on Ascend, mccl ones on the CPU, in PyNative mode.

The neutral packages reach it through `hp_platform.get_platform()`; code under a `mindspore/` folder may import its
modules directly.
"""

from __future__ import annotations

from hp_platform.mindspore import collectives, fused, groups, random
from hp_platform.mindspore.devices import devices
from hp_platform.platform import Platform

__all__ = ["platform"]


def platform() -> Platform:
    """Assemble the platform from its roles."""
    return Platform("mindspore", groups=groups, collectives=collectives, devices=devices, random=random, fused=fused)
