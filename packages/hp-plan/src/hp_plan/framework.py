"""The modules of the framework folder in use: what differs between a Module of torch and a Cell of MindSpore."""

from __future__ import annotations

import importlib
from typing import Any

from hp_platform import get_platform


def framework(module: str) -> Any:
    """The module of this name in `hp_plan.torch` or `hp_plan.mindspore`."""
    return importlib.import_module(f"hp_plan.{get_platform().name}.{module}")
