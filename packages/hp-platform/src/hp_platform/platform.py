"""Which framework is in use, and its parts."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass

from hp_platform.protocols import Collectives, Devices, Fused, Groups, Random
from hp_platform.settings import PLATFORM, PLATFORMS, wanted_platform


@dataclass(frozen=True)
class Platform:
    """A framework, by the roles it plays.

    Attributes:
        name: "torch" or "mindspore"; also the name of the folder that holds each package's code for it.
        groups: process groups.
        collectives: communication inside a group.
        devices: the kind of device in use, its memory and streams.
        random: the random generators.
        fused: fused operators, composed of others where the device has none.
    """

    name: str
    groups: Groups
    collectives: Collectives
    devices: Devices
    random: Random
    fused: Fused


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
    name = platform_name()
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ImportError(
            f"{PLATFORM}={name}, but {name} is not installed. Install it with: pip install 'hp-platform[{name}]'"
        )
    return importlib.import_module(f"hp_platform.{name}").platform()


def platform_name() -> str:
    """Choose the platform as `get_platform` does, and import nothing.

    Returns:
        "torch" or "mindspore".

    Raises:
        SettingError: HYPER_PARALLEL_PLATFORM names no platform (a ValueError).
        ImportError: no framework is installed.
    """
    wanted = wanted_platform()
    if wanted is not None:
        return wanted
    for name in PLATFORMS:
        if name in sys.modules:
            return name
    for name in PLATFORMS:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError(
        f"no framework is installed: hp-platform needs one of {', '.join(PLATFORMS)}. "
        "Install one with: pip install 'hp-platform[torch]' or pip install 'hp-platform[mindspore]'"
    )
