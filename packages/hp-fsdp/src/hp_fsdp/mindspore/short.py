"""Short forms of `fully_shard`: PyTorch's for now."""

from __future__ import annotations

from typing import NoReturn

from mindspore import nn

__all__ = ["hsdp", "modules_by_size"]


def hsdp(module: nn.Cell, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> NoReturn:
    """Not supported on MindSpore yet.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "hsdp is not supported on MindSpore yet. Level 3 is fully_shard(cell); levels 1 and 2 are fully_shard(cell,"
        " reshard_after_forward=False)"
    )


def modules_by_size(model: nn.Cell, max_bytes: int) -> NoReturn:
    """Not supported on MindSpore yet.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "modules_by_size is not supported on MindSpore yet; call fully_shard on Cells of your choice"
    )
