"""The environment variables that choose a framework and a kind of device."""

from __future__ import annotations

import os
from collections.abc import Callable

PLATFORM = "HYPER_PARALLEL_PLATFORM"
DEVICE = "HYPER_PARALLEL_DEVICE"
PLATFORMS = ("torch", "mindspore")
KINDS = ("cpu", "cuda", "npu")


class SettingError(ValueError):
    """An environment variable has a value that is unknown or unavailable; the text lists the choices."""


def wanted_platform() -> str | None:
    """Read the framework that HYPER_PARALLEL_PLATFORM names, or None if it is unset.

    Raises:
        SettingError: it names no framework.
    """
    wanted = os.environ.get(PLATFORM)
    if wanted and wanted not in PLATFORMS:
        raise SettingError(f"{PLATFORM}={wanted!r} is not a platform. Choose one of: {', '.join(PLATFORMS)}.")
    return wanted or None


def choose_kind(present: Callable[[], tuple[str, ...]], framework: str) -> str:
    """Choose the kind of device: the one that HYPER_PARALLEL_DEVICE names, else the last one that is present.

    Args:
        present: lists the kinds that this machine has; not called for "cpu", since it may start an accelerator.
        framework: its name and version, for the error.

    Raises:
        SettingError: the kind is not known, or not present.
    """
    wanted = os.environ.get(DEVICE)
    if wanted == "cpu":
        return wanted
    found = present()
    if not wanted:
        return found[-1]
    if wanted in found:
        return wanted
    here = f"{framework} finds on this machine: {', '.join(found)}"
    if wanted not in KINDS:
        raise SettingError(f"{DEVICE}={wanted!r} is not a kind of device. Choose one of: {', '.join(KINDS)}; {here}.")
    raise SettingError(f"{DEVICE}={wanted!r}, but {here}. Set it to one of these, or unset it.")
