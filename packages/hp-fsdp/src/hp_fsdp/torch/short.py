"""Short forms of `fully_shard`: by ZeRO level, and which modules to call it on."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from hp_fsdp import short
from hp_fsdp.torch.api import fully_shard
from hp_fsdp.torch.module import HSDPModule

__all__ = ["hsdp", "modules_by_size"]

M = TypeVar("M", bound=nn.Module)


def hsdp(module: M, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> M:
    """Makes one group of a module, as `fully_shard`, by ZeRO level and number of ranks.

    | level | sharded | parameters are gathered |
    | --- | --- | --- |
    | ``"level1"`` | optimizer states | once a step, at the first forward, and stay until the optimizer has stepped |
    | ``"level2"`` | gradients, too | the same |
    | ``"level3"`` | parameters, too | for each forward and for each backward (the outermost module's: once) |

    Levels 1 and 2 are one: gradients are reduce-scattered in both, which moves half of what an all-reduce does. Only
    under ``set_requires_gradient_sync(False)`` do they accumulate whole, at any level.

    Example:
        >>> for layer in model.layers:
        ...     hsdp(layer, optimizer_level="level3")
        >>> hsdp(model, optimizer_level="level3")

    Args:
        module: inner modules first, the model last.
        shard_size: ranks of a shard group; with fewer than all, groups are replicas of one another. Default -1: all.
        threshold: a module of which the group's parameters hold less than so many KiB is not sharded: its gradients are
            averaged, nothing is gathered. Small parameters of a larger group are sharded with it, since they travel in
            its flat buffer. Default 64.
        optimizer_level: see above. Default ``"level1"``.

    Returns:
        ``module``.

    Raises:
        ValueError: an argument out of its range, or a ``shard_size`` that does not divide the number of ranks.
        NotImplementedError: a module below ``threshold`` with replicas.
    """
    mesh, stays = short.hsdp_mesh(
        type(module).__name__, _ANATOMY.bytes_of(module), shard_size, threshold, optimizer_level
    )
    made = fully_shard(module, mesh, reshard_after_forward=not stays)
    made.set_reshard_after_backward(not stays, recurse=False)  # type: ignore[operator]
    return made


def modules_by_size(model: nn.Module, max_bytes: int) -> list[nn.Module]:
    """The modules to call `fully_shard` on, so that groups hold at most ``max_bytes`` where modules allow it.

    From the model down, the first modules that are small enough are groups. A module without a forward of its own
    (``ModuleList``), one that shares a parameter with others, and one that holds very little is none: its parameters
    fall to the group around it.

    Example:
        >>> for module in modules_by_size(model, 64 << 20):
        ...     fully_shard(module, mesh)

    Args:
        model: not sharded yet.
        max_bytes: of parameters. A single module that directly holds more is a group of its own.

    Returns:
        The modules, inner before outer, ``model`` last.

    Raises:
        ValueError: ``max_bytes`` below one.
    """
    return short.modules_by_size(model, max_bytes, _ANATOMY)


def _computes(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.ModuleDict)
    return not (isinstance(module, containers) and type(module).forward is nn.Module.forward)


_ANATOMY = short.Anatomy(
    parameters="_parameters",
    children="_modules",
    sharded=HSDPModule,
    computes=_computes,
    nbytes=lambda parameter: parameter.numel() * parameter.element_size(),
)
