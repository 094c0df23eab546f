"""The framework and the device in use, and the door from neutral code to a framework's part of a package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

P = TypeVar("P")

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
    name = os.environ.get(PLATFORM)
    if name and name not in PLATFORMS:
        raise SettingError(f"{PLATFORM}={name!r} is not a platform. Choose one of: {', '.join(PLATFORMS)}.")
    return name or None


def choose_kind(present: Callable[[], tuple[str, ...]], framework: str) -> str:
    """Choose the kind of device: the one that HYPER_PARALLEL_DEVICE names, else the last one that is present.

    Args:
        present: lists the kinds that this machine has; not called for "cpu", since it may start an accelerator.
        framework: its name and version, for the error.

    Raises:
        SettingError: the kind is not known, or not present.
    """
    kind = os.environ.get(DEVICE)
    if kind == "cpu":
        return kind
    kinds = present()
    if not kind:
        return kinds[-1]
    if kind in kinds:
        return kind
    here = f"{framework} finds on this machine: {', '.join(kinds)}"
    if kind not in KINDS:
        raise SettingError(f"{DEVICE}={kind!r} is not a kind of device. Choose one of: {', '.join(KINDS)}; {here}.")
    raise SettingError(f"{DEVICE}={kind!r}, but {here}. Set it to one of these, or unset it.")


def platform_name() -> str:
    """Choose the platform as `get_platform` does, and import nothing.

    Returns:
        "torch" or "mindspore".

    Raises:
        SettingError: HYPER_PARALLEL_PLATFORM names no platform (a ValueError).
        ImportError: no framework is installed.
    """
    setting = wanted_platform()
    if setting is not None:
        return setting
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


def installed_platform() -> str:
    """Choose the platform as `platform_name` does, and check that it can be imported.

    Raises:
        SettingError: HYPER_PARALLEL_PLATFORM names no platform (a ValueError).
        ImportError: no framework is installed, or the chosen one is not.
    """
    name = platform_name()
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ImportError(
            f"{PLATFORM}={name}, but {name} is not installed. Install it with: pip install 'hp-platform[{name}]'"
        )
    return name


def load_port(protocol: type[P], module: str = "port") -> P:
    """Import a package's port to the platform in use.

    A package declares its primitives as a protocol in `<package>/port.py`. Each framework's folder implements it as a
    module, `<package>/torch/port.py` and `<package>/mindspore/port.py`:

        class Port(Protocol):
            def shape_of(self, tensor: Tensor) -> tuple[int, ...]: ...

        @functools.cache
        def port() -> Port:
            return load_port(Port)

    Args:
        protocol: the protocol class; its module names the package.
        module: the module that implements it, where a package has several protocols and imports each at its use.

    Returns:
        The module that implements it.

    Raises:
        SettingError: HYPER_PARALLEL_PLATFORM names no platform (a ValueError).
        ImportError: no framework is installed, or the chosen one is not.
    """
    package = protocol.__module__.partition(".")[0]
    return cast(P, importlib.import_module(f"{package}.{installed_platform()}.{module}"))


def lazy_exports(package_name: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package whose names live in its framework folder.

    A name is resolved at first use and then stored in the package, so later uses cost a plain attribute.

        __getattr__, __dir__ = lazy_exports(__name__, {"DTensor": "dtensor"})
        # on PyTorch: hp_dtensor.DTensor is hp_dtensor.torch.dtensor.DTensor

    Args:
        package_name: the package's `__name__`.
        names: exported name to module, relative to the folder of the platform in use.

    Returns:
        The two functions to bind at the package's top level.
    """

    def resolve(name: str) -> Any:
        module = names.get(name)
        if module is None:
            raise AttributeError(f"module {package_name!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package_name}.{installed_platform()}.{module}"), name)
        setattr(sys.modules[package_name], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package_name]), *names})

    return resolve, listing
