"""The platform in use."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hp_platform import collectives, devices, fused, groups, random
from hp_platform.platforms.ports import installed_platform


@dataclass(frozen=True)
class Platform:
    """A framework, by the roles it plays. The roles are modules of `hp_platform`, the same for every framework.

    Attributes:
        name: "torch" or "mindspore"; also the name of the folder that holds each package's code for it.
        groups: process groups.
        collectives: communication inside a group.
        devices: the kind of device in use, its memory and streams.
        random: the random generators.
        fused: fused operators, composed of others where the device has none.
    """

    name: str
    groups = groups
    collectives = collectives
    devices = devices.devices
    random = random
    fused = fused


@functools.cache
def get_platform() -> Platform:
    """Get the platform in use, the same object at every call.

    It is the one that the environment variable HYPER_PARALLEL_PLATFORM names, else the framework already imported,
    else the one installed, and torch where there is a choice.

    Returns:
        The platform.

    Raises:
        SettingError: HYPER_PARALLEL_PLATFORM names no platform (a ValueError).
        ImportError: no framework is installed, or the chosen one is not.
    """
    return Platform(installed_platform())
