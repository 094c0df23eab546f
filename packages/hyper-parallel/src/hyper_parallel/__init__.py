"""Every public name of HyperParallel in one place: `from hyper_parallel import fully_shard`.

A name comes from the package that has it, at first use. The `hyper-parallel` command and the trainer live here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel import facade

if TYPE_CHECKING:
    from hp_dtensor import *  # noqa: F403
    from hp_fsdp import *  # noqa: F403
    from hp_plan import *  # noqa: F403
    from hp_platform import *  # noqa: F403
    from hp_styles import *  # noqa: F403


def __getattr__(name: str) -> Any:
    value = facade.names() if name == "__all__" else facade.resolve(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *facade.names()})
