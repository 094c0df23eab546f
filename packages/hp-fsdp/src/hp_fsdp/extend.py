"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_fsdp.grad_norm import counts_here
from hp_fsdp.groups.managed_params import Roster
from hp_fsdp.port import sharding

__all__ = ["Roster", "counts_here", "watch_optimizers"]


def watch_optimizers() -> None:
    """Check the parameters of optimizers from now on, before their first step."""
    sharding().watch_optimizers()
