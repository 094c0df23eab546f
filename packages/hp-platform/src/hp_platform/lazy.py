"""Names that a package exports before any framework is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


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
        from hp_platform.platform import get_platform

        value = getattr(importlib.import_module(f"{package_name}.{get_platform().name}.{module}"), name)
        setattr(sys.modules[package_name], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package_name]), *names})

    return resolve, listing
