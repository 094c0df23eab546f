"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_platform.groups import when_groups_end
from hp_platform.host import end_with_parent, watch_parent
from hp_platform.observing import communicate_for, communicating_for, observers
from hp_platform.ports import (
    DEVICE,
    KINDS,
    PLATFORM,
    PLATFORMS,
    SettingError,
    load_port,
    platform_name,
    wanted_platform,
)

__all__ = [
    "DEVICE",
    "KINDS",
    "PLATFORM",
    "PLATFORMS",
    "SettingError",
    "communicate_for",
    "communicating_for",
    "end_with_parent",
    "load_port",
    "observers",
    "platform_name",
    "wanted_platform",
    "watch_parent",
    "when_groups_end",
]
