"""The primitives of hp-platform on MindSpore: hccl groups on Ascend, mccl ones on the CPU, in PyNative mode."""

from __future__ import annotations

from hp_platform.mindspore import collectives, devices, fused, groups, random

__all__ = ["collectives", "devices", "fused", "groups", "random"]
