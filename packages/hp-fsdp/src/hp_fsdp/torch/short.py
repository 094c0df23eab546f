"""Short forms of `fully_shard`: by ZeRO level, and which modules to call it on."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp.torch.api import fully_shard
from hp_fsdp.torch.module import HSDPModule
from hp_platform import get_platform

__all__ = ["hsdp", "modules_by_size"]

M = TypeVar("M", bound=nn.Module)
LEVELS = ("level1", "level2", "level3")
TINY = 16
"""A group of less than one part in so many of the wanted size is not worth collectives of its own."""


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
    if optimizer_level not in LEVELS:
        raise ValueError(f"hsdp: optimizer_level must be one of {', '.join(LEVELS)}, got {optimizer_level!r}")
    if not isinstance(threshold, int) or threshold < 0:
        raise ValueError(f"hsdp: threshold must be a number of KiB, 0 or more, got {threshold!r}")
    groups = get_platform().groups
    if not groups.is_initialized():  # type: ignore[attr-defined]
        groups.init_process_group()
    ranks = groups.size()
    size = ranks if shard_size == -1 else shard_size
    if not isinstance(size, int) or size < 1 or ranks % size:
        raise ValueError(f"hsdp: shard_size must be -1 or divide the {ranks} ranks, got {shard_size!r}")
    # The last axis, of one rank, is what a module that is not sharded is "sharded" over. Names are these meshes' own:
    # a slice that equals one of another mesh would be that one, and norms need slices of one mesh.
    names = ("hsdp_replicate", "hsdp_shard", "hsdp_alone")
    root = init_device_mesh(get_platform().devices.kind, (ranks // size, size, 1), mesh_dim_names=names)
    mesh = root["hsdp_shard"] if size == ranks else root["hsdp_replicate", "hsdp_shard"]
    if _bytes(module, {}) < threshold * 1024:
        if size < ranks:
            raise NotImplementedError(
                f"hsdp: {type(module).__name__} is below the threshold of {threshold} KiB, which is not supported with"
                f" shard_size={shard_size}, less than all {ranks} ranks. Use threshold=0"
            )
        mesh = root["hsdp_shard", "hsdp_alone"]
    stays = optimizer_level != "level3"
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
    if max_bytes < 1:
        raise ValueError(f"modules_by_size: max_bytes must be at least 1, got {max_bytes}")
    shared: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                shared[id(parameter)] = shared.get(id(parameter), 0) + 1
    found: list[nn.Module] = []
    taken: dict[int, int] = {}  # ids of parameters that have a group

    def visit(module: nn.Module) -> None:
        if _bytes(module, taken) > max_bytes:
            for child in module.children():
                visit(child)
        if module is not model and _fits(module, shared) and _bytes(module, taken) * TINY >= max_bytes:
            take(module)

    def take(module: nn.Module) -> None:
        if module not in found:
            found.append(module)
            taken.update((id(parameter), 1) for parameter in module.parameters())

    visit(model)
    take(model)
    return found


def _bytes(module: nn.Module, taken: dict[int, int]) -> int:
    """Bytes of the parameters of a module that have no group yet."""
    owned = {id(p) for each in module.modules() if isinstance(each, HSDPModule) for p in each.parameters()}
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in owned and id(p) not in taken)


def _fits(module: nn.Module, shared: dict[int, int]) -> bool:
    """Whether a module can be a group: it computes, and nobody else has its parameters."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        return False
    inside: dict[int, int] = {}
    for each in module.modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return all(shared[key] == count for key, count in inside.items())
