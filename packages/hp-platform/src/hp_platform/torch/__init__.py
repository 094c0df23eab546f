"""The PyTorch platform: gloo, nccl and hccl process groups on cpu, cuda and npu devices.

The neutral packages reach it through `hp_platform.get_platform()`; code under a `torch/` folder may import its
modules directly.
"""

from __future__ import annotations

from hp_platform.platform import Platform
from hp_platform.torch import collectives, fused, groups, random
from hp_platform.torch.devices import devices

__all__ = ["platform"]


def platform() -> Platform:
    """Assemble the platform from its roles."""
    return Platform("torch", groups=groups, collectives=collectives, devices=devices, random=random, fused=fused)
