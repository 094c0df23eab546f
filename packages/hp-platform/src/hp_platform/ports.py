"""Which framework is in use, and the door from neutral code to what a package wrote for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TypeVar, cast

from hp_platform.settings import PLATFORM, PLATFORMS, wanted_platform

P = TypeVar("P")


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
