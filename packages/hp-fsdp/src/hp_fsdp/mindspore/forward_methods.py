"""Methods of sharded Cells that would gather parameters as construct does: not on MindSpore."""

from __future__ import annotations

from typing import Any

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Not on MindSpore, whose backward passes follow the construct of Cells.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"register_fsdp_forward_method({type(module).__name__}, {method_name!r}): on MindSpore the parameters of a"
        " sharded Cell are gathered around its construct only. Call fully_shard on a Cell whose construct calls the"
        " method"
    )
