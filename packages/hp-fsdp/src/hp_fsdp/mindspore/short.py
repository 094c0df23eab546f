"""Short forms of `fully_shard`: by ZeRO level, and which Cells to call it on."""

from __future__ import annotations

import math
from typing import TypeVar

from mindspore import nn

from hp_fsdp import short
from hp_fsdp.mindspore.api import fully_shard, has_construct
from hp_fsdp.mindspore.bucket import itemsize
from hp_fsdp.mindspore.module import HSDPModule

__all__ = ["hsdp", "modules_by_size"]

M = TypeVar("M", bound=nn.Cell)


def hsdp(module: M, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> M:
    """Makes one group of a Cell, as `fully_shard`, by ZeRO level and number of ranks.

    | level | sharded | parameters are gathered |
    | --- | --- | --- |
    | ``"level1"`` | optimizer states | once a step, at the first forward, and stay until its last backward |
    | ``"level2"`` | gradients, too | the same |
    | ``"level3"`` | parameters, too | for each forward and for each backward (the outermost Cell's: once) |

    Levels 1 and 2 are one: gradients are reduce-scattered in both, which moves half of what an all-reduce does. Only
    under ``set_requires_gradient_sync(False)`` do they accumulate whole, at any level.

    Example:
        >>> for layer in model.layers:
        ...     hsdp(layer, optimizer_level="level3")
        >>> hsdp(model, optimizer_level="level3")

    Args:
        module: inner Cells first, the model last.
        shard_size: ranks of a shard group; with fewer than all, groups are replicas of one another. Default -1: all.
        threshold: a Cell of which the group's parameters hold less than so many KiB is not sharded: its gradients are
            averaged, nothing is gathered. Small parameters of a larger group are sharded with it, since they travel in
            its flat buffer. Default 64.
        optimizer_level: see above. Default ``"level1"``.

    Returns:
        ``module``.

    Raises:
        ValueError: an argument out of its range, or a ``shard_size`` that does not divide the number of ranks.
        NotImplementedError: a Cell below ``threshold`` with replicas.
    """
    mesh, stays = short.hsdp_mesh(
        type(module).__name__, _ANATOMY.bytes_of(module), shard_size, threshold, optimizer_level
    )
    made = fully_shard(module, mesh, reshard_after_forward=not stays)
    made.set_reshard_after_backward(not stays, recurse=False)  # type: ignore[operator]
    return made


def modules_by_size(model: nn.Cell, max_bytes: int) -> list[nn.Cell]:
    """The Cells to call `fully_shard` on, so that groups hold at most ``max_bytes`` where Cells allow it.

    From the model down, the first Cells that are small enough are groups. A Cell without a construct of its own
    (``CellList``), one that shares a parameter with others, and one that holds very little is none: its parameters
    fall to the group around it.

    Example:
        >>> for cell in modules_by_size(model, 64 << 20):
        ...     fully_shard(cell, mesh)

    Args:
        model: not sharded yet.
        max_bytes: of parameters. A single Cell that directly holds more is a group of its own.

    Returns:
        The Cells, inner before outer, ``model`` last.

    Raises:
        ValueError: ``max_bytes`` below one.
    """
    return short.modules_by_size(model, max_bytes, _ANATOMY)


_ANATOMY = short.Anatomy(
    parameters="_params",
    children="_cells",
    sharded=HSDPModule,
    computes=has_construct,
    nbytes=lambda parameter: math.prod(parameter.shape) * itemsize(parameter.dtype),
)
