"""The modules of the framework folder in use."""

from __future__ import annotations

import importlib
from typing import Any

from hp_platform import get_platform


def framework(module: str) -> Any:
    """The module of this name in `hyper_parallel.torch` or `hyper_parallel.mindspore`."""
    return importlib.import_module(f"hyper_parallel.{get_platform().name}.{module}")
