"""The process groups of a mesh: the world's start, and meshes of groups that are there already."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_platform import get_platform

if TYPE_CHECKING:
    from hp_dtensor.mesh import DeviceMesh

__all__ = ["adopt", "check_world", "start"]


def start() -> None:
    """Chooses the device that torchrun gave this process, where nothing was chosen; makes the default group."""
    platform, local = get_platform(), os.environ.get("LOCAL_RANK")
    if local is not None and platform.devices.kind != "cpu":
        used = getattr(platform.devices.device_module(), "is_initialized", None)
        if used is not None and not used():
            platform.devices.set_device(int(local))
    if not platform.groups.is_initialized():
        platform.groups.init_process_group()


def check_world(mesh: DeviceMesh) -> None:
    """Raises ValueError where the world has not all the ranks."""
    world = get_platform().groups.size()
    outside = [rank for rank in mesh.mesh.reshape(-1).tolist() if not 0 <= rank < world]
    if outside:
        raise ValueError(f"DeviceMesh: ranks {outside} of {mesh.mesh.tolist()} are not in the world of {world} ranks")


def adopt(mesh: DeviceMesh, given: Sequence[Any]) -> None:
    """Gives a mesh these groups, one an axis: see ``DeviceMesh.from_group``."""
    groups = get_platform().groups
    if mesh.ndim != len(given):
        raise ValueError(f"from_group: {len(given)} groups for a mesh of {mesh.ndim} axes")
    if mesh.get_coordinate() is None:
        raise ValueError(f"from_group: rank {mesh.get_rank()} is not in {mesh}; the members of the groups call this")
    for axis, group in enumerate(given):
        line, have = mesh._line(axis), groups.ranks(group)
        if sorted(line) != sorted(have):
            raise ValueError(f"from_group: axis {axis} holds ranks {line}, its group holds {have}")
    groups.mark_created(given)
    mesh._groups = tuple(given)
