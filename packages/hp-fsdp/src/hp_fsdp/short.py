"""Short forms of `fully_shard`, whatever the framework: meshes by ZeRO level, and which modules to call it on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hp_dtensor import init_device_mesh
from hp_dtensor.mesh import DeviceMesh
from hp_platform import get_platform

__all__ = ["Anatomy", "hsdp_mesh", "modules_by_size"]

LEVELS = ("level1", "level2", "level3")
TINY = 16
"""A group of less than one part in so many of the wanted size is not worth collectives of its own."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where a framework's modules have their parts.

    Attributes:
        parameters: the attribute that maps names to parameters.
        children: the attribute that maps names to modules.
        sharded: the class of modules that `fully_shard` was called on.
        computes: whether a module has a forward of its own.
        nbytes: of a parameter, whole.
    """

    parameters: str
    children: str
    sharded: type
    computes: Callable[[Any], bool]
    nbytes: Callable[[Any], int]

    def children_of(self, module: Any) -> Iterator[Any]:
        """The modules directly inside."""
        return (child for child in getattr(module, self.children).values() if child is not None)

    def modules(self, module: Any) -> list[Any]:
        """``module`` and all inside, each once, outer before inner."""
        found: dict[int, Any] = {}
        waiting = [module]
        while waiting:
            current = waiting.pop()
            if id(current) not in found:
                found[id(current)] = current
                waiting += reversed(list(self.children_of(current)))
        return list(found.values())

    def uses(self, module: Any) -> Iterator[Any]:
        """Each parameter of ``module``, as often as it is registered."""
        for each in self.modules(module):
            yield from (parameter for parameter in getattr(each, self.parameters).values() if parameter is not None)

    def bytes_of(self, module: Any, taken: Collection[int] = ()) -> int:
        """Bytes of the parameters of a module that no group has yet.

        Args:
            module: the module.
            taken: ids of parameters to leave out.
        """
        owned = {
            id(parameter)
            for each in self.modules(module)
            if isinstance(each, self.sharded)
            for parameter in self.uses(each)
        }
        free = {id(p): p for p in self.uses(module) if id(p) not in owned and id(p) not in taken}
        return sum(self.nbytes(parameter) for parameter in free.values())


def hsdp_mesh(name: str, nbytes: int, shard_size: int, threshold: int, optimizer_level: str) -> tuple[DeviceMesh, bool]:
    """Where `hsdp` shards a module.

    Args:
        name: the module's class, for errors.
        nbytes: of the parameters of its group.
        shard_size: as given.
        threshold: as given.
        optimizer_level: as given.

    Returns:
        The mesh, and whether gathered parameters stay until the optimizer has stepped.

    Raises:
        ValueError, NotImplementedError: see `hsdp`.
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
    if nbytes < threshold * 1024:
        if size < ranks:
            raise NotImplementedError(
                f"hsdp: {name} is below the threshold of {threshold} KiB, which is not supported with"
                f" shard_size={shard_size}, less than all {ranks} ranks. Use threshold=0"
            )
        mesh = root["hsdp_shard", "hsdp_alone"]
    return mesh, optimizer_level != "level3"


def modules_by_size(model: Any, max_bytes: int, anatomy: Anatomy) -> list[Any]:
    """The modules to call `fully_shard` on; see the frameworks' functions of this name.

    Args:
        model: not sharded yet.
        max_bytes: of parameters.
        anatomy: where modules have their parts.

    Returns:
        The modules, inner before outer, ``model`` last.

    Raises:
        ValueError: ``max_bytes`` below one.
        TypeError: ``max_bytes`` that is no int.
    """
    if not isinstance(max_bytes, int):
        raise TypeError(f"modules_by_size: max_bytes must be a number of bytes, got {max_bytes!r}")
    if max_bytes < 1:
        raise ValueError(f"modules_by_size: max_bytes must be at least 1, got {max_bytes}")
    shared = _uses(anatomy, model)
    found: dict[int, Any] = {}
    taken: set[int] = set()  # ids of parameters that have a group

    def visit(module: Any) -> None:
        if anatomy.bytes_of(module, taken) > max_bytes:
            for child in anatomy.children_of(module):
                visit(child)
        worth = anatomy.bytes_of(module, taken) * TINY >= max_bytes
        if module is not model and worth and _fits(anatomy, module, shared):
            take(module)

    def take(module: Any) -> None:
        if id(module) not in found:
            found[id(module)] = module
            taken.update(id(parameter) for parameter in anatomy.uses(module))

    visit(model)
    take(model)
    return list(found.values())


def _uses(anatomy: Anatomy, module: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    for parameter in anatomy.uses(module):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _fits(anatomy: Anatomy, module: Any, shared: dict[int, int]) -> bool:
    """Whether a module can be a group: it computes, and nobody else has its parameters."""
    inside = _uses(anatomy, module)
    return anatomy.computes(module) and all(shared[key] == count for key, count in inside.items())
