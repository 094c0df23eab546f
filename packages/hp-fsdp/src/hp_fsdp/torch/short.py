"""Short forms of `fully_shard`: by ZeRO level, and which modules to call it on."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from hp_fsdp import short
from hp_fsdp.torch.api import check_module, shard
from hp_fsdp.torch.module import HSDPModule

__all__ = ["hsdp", "modules_by_size"]

M = TypeVar("M", bound=nn.Module)


def hsdp(
    module: M,
    shard_size: int = -1,
    threshold: int = 64,
    optimizer_level: str = "level1",
    enable_grad_accumulation: bool = False,
    grad_scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
    comm_async: bool = False,
    comm_fusion: bool = False,
    bucket_size: int = -1,
) -> M:
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
        module: inner modules first, the model last. Its parameters' own layouts say which axes are those of data
            parallelism: with one on a whole mesh (`shard_module`), those on which all are replicated; with one on a
            slice (styles on ``mesh["tp"]``), the other axes of the mesh; plain ones have all ranks.
        shard_size: ranks of a shard group; with fewer than all, groups are replicas of one another. 1 is plain data
            parallelism: parameters stay whole, and their gradients are averaged. Default -1: all.
        threshold: parameters of less than so many KiB, whole, stay whole on each rank. Default 64.
        optimizer_level: see above. Default ``"level1"``.
        enable_grad_accumulation: backward passes add up gradients without communication, until
            ``set_requires_gradient_sync(True)`` asks for the next ones to reduce. Default False: all reduce.
        grad_scale: what reduced gradients are multiplied by. Default 1.
        reduce_dtype: gradients are reduced in this dtype. Default: their own.
        comm_async: backward returns while reductions are under way: `hsdp_sync_stream` waits for them, as do an
            optimizer's step and `clip_grad_norm_`. Default False: backward waits.
        comm_fusion: parameters are gathered, and their gradients reduced, together. Default False: one by one.
        bucket_size: with ``comm_fusion``, what is communicated as one holds no more than so many KiB of parameters, but
            one parameter at least; 0 is one by one. Default -1: no limit.

    Returns:
        ``module``.

    Raises:
        ValueError: an argument out of its range, a ``shard_size`` that does not divide the number of ranks, or a
            ``bucket_size`` without ``comm_fusion``.
        TypeError: an argument of another type, or something that is no module.
    """
    check_module(module)
    options = short.hsdp_options(
        shard_size=shard_size,
        threshold=threshold,
        optimizer_level=optimizer_level,
        enable_grad_accumulation=enable_grad_accumulation,
        grad_scale=grad_scale,
        reduce_dtype=reduce_dtype,
        comm_async=comm_async,
        comm_fusion=comm_fusion,
        bucket_size=bucket_size,
        dtype_class=torch.dtype,
    )
    shard([module], short.hsdp_mesh(module, _ANATOMY, shard_size), options.group)
    options.setup(module)
    return module


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
