"""The primitives of hp-platform on PyTorch: gloo, nccl and hccl process groups on cpu, cuda and npu devices."""

from __future__ import annotations

from hp_platform.torch import collectives, devices, fused, groups, random

__all__ = ["collectives", "devices", "fused", "groups", "random"]
