"""Which package has which public name, known without importing any."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

PUBLIC: dict[str, tuple[str, ...]] = {
    "hp_platform": (
        "Platform",
        "destroy_process_group",
        "get_backend",
        "get_group_local_rank",
        "get_platform",
        "get_process_group_ranks",
        "init_process_group",
        "manual_seed",
        "mark_created_groups",
        "split_group",
    ),
}


def names() -> list[str]:
    """The public names of the packages that are installed."""
    return [name for package, inside in PUBLIC.items() if _installed(package) for name in inside]


def resolve(name: str) -> Any:
    """The object called `name`.

    Raises:
        AttributeError: no package has such a name.
        ImportError: the package that has it isn't installed.
    """
    for package, inside in PUBLIC.items():
        if name in inside:
            if not _installed(package):
                distribution = package.replace("_", "-")
                raise ImportError(f"{name} is in {distribution}, which is not installed: pip install {distribution}")
            return getattr(importlib.import_module(package), name)
    raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
