"""Which framework is in use, and its parts."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass

from hp_platform.protocols import Collectives, Devices, Fused, Groups, Random

VARIABLE = "HYPER_PARALLEL_PLATFORM"
CHOICES = ("torch", "mindspore")


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
        ValueError: HYPER_PARALLEL_PLATFORM names no platform.
        ImportError: no framework is installed, or the chosen one is not.
    """
    name = platform_name()
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ImportError(
            f"{VARIABLE}={name}, but {name} is not installed. Install it with: pip install 'hp-platform[{name}]'"
        )
    return importlib.import_module(f"hp_platform.{name}").platform()


def platform_name() -> str:
    """Choose the platform as `get_platform` does, and import nothing.

    Returns:
        "torch" or "mindspore".

    Raises:
        ValueError: HYPER_PARALLEL_PLATFORM names no platform.
        ImportError: no framework is installed.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if wanted not in CHOICES:
            raise ValueError(f"{VARIABLE}={wanted!r} names no platform. Choose one of: {', '.join(CHOICES)}.")
        return wanted
    for name in CHOICES:
        if name in sys.modules:
            return name
    for name in CHOICES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ImportError(
        f"no framework is installed: hp-platform needs one of {', '.join(CHOICES)}. "
        "Install one with: pip install 'hp-platform[torch]' or pip install 'hp-platform[mindspore]'"
    )
