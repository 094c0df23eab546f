"""Every public name of HyperParallel in one place: `from hyper_parallel import fully_shard`.

A name comes from the package that has it, at first use. The `hyper-parallel` command, the trainer and `run_ranks`, for
notebooks, are here as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_checkpoint import *  # noqa: F403
    from hp_dtensor import *  # noqa: F403
    from hp_fsdp import *  # noqa: F403
    from hp_moe import *  # noqa: F403
    from hp_offload import *  # noqa: F403
    from hp_onesided import *  # noqa: F403
    from hp_optim import *  # noqa: F403
    from hp_pipeline import *  # noqa: F403
    from hp_plan import *  # noqa: F403
    from hp_platform import *  # noqa: F403
    from hp_styles import *  # noqa: F403
    from hyper_parallel.launching.ranks import run_ranks  # noqa: F401

PACKAGES = (
    "hp_platform",
    "hp_dtensor",
    "hp_styles",
    "hp_moe",
    "hp_fsdp",
    "hp_offload",
    "hp_onesided",
    "hp_optim",
    "hp_checkpoint",
    "hp_pipeline",
    "hp_plan",
)
"""The packages whose public names are here, none of which imports a framework before it is needed."""
_OWN = {"run_ranks": "hyper_parallel.launching.ranks"}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _OWN:
        value = globals()[name] = getattr(importlib.import_module(_OWN[name]), name)
        return value
    for package in map(importlib.import_module, () if name.startswith("__") else PACKAGES):
        if name in package.__all__:
            value = globals()[name] = getattr(package, name)
            return value
    raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_OWN, *(name for package in PACKAGES for name in importlib.import_module(package).__all__)})
