"""The process groups of a mesh: initialisation, options, adoption; the living meshes and their common root.

Note [Equal slices of different roots]
    Meshes are values: of equal slices of two roots, layouts keep the one that came first. So the root of a layout's
    mesh may be that of another model, and meshes of one model may have several. What matters is that there is a root
    that they all are slices of, by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.mesh.axes import MeshValueError
from hp_platform import get_platform
from hp_platform.extend import inside_launcher, launch_command, launcher_place, when_groups_end

if TYPE_CHECKING:
    from hp_dtensor.mesh.device_mesh import DeviceMesh
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_dtensor.mesh.device_mesh import DeviceMesh


# By identity: equal meshes have groups of their own.
_living: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


def note(mesh: DeviceMesh) -> None:
    """Register a new mesh, whose groups may be destroyed during its life."""
    _living[id(mesh)] = mesh


def living() -> list[DeviceMesh]:
    """List the meshes that are in use."""
    return list(_living.values())


@when_groups_end
def _forget_groups() -> None:
    """Drop the groups of all meshes, which as values outlive them; the next use creates new ones."""
    for mesh in living():
        mesh._groups = mesh._rank = None


def start() -> None:
    """Use the device that the launcher assigned, unless the process uses one already, and create the default group."""
    platform, place = get_platform(), launcher_place()
    if place is not None and platform.devices.kind != "cpu":
        used = getattr(platform.devices.device_module(), "is_initialized", None)
        if used is not None and not used():
            platform.devices.set_device(place.local_rank)
    if not platform.groups.is_initialized():
        platform.groups.init_process_group()


def check_world(mesh: DeviceMesh) -> None:
    """Raise ValueError if the mesh names ranks outside the world."""
    world = get_platform().groups.size()
    outside = [rank for rank in mesh.ranks.reshape(-1).tolist() if not 0 <= rank < world]
    if outside:
        raise MeshValueError(
            f"DeviceMesh: ranks {outside} of {mesh.ranks.tolist()} are not in the world of {world} ranks"
            f"{advice_for(max(outside) + 1)}"
        )


def advice_for(ranks: int) -> str:
    """Return what to do where a process that no launcher has started needs so many ranks; empty elsewhere."""
    platform = get_platform()
    if platform.groups.size() > 1 or inside_launcher():
        return ""
    return f"; no launcher started this process: start it with {launch_command(platform.name, ranks)}"


def read_options(override: Any, names: Sequence[str] | None, ndim: int) -> dict[int, Any]:
    """Return the group options of each axis that ``backend_override`` has some for.

    Args:
        override: see ``DeviceMesh``.
        names: the names of the axes.
        ndim: the number of axes.

    Raises:
        ValueError: an unknown or repeated axis, or a different number of values than of axes (each also a
            RuntimeError); or a backend other than the default group's.
    """
    if override is None:
        return {}
    if not isinstance(override, Mapping):
        if isinstance(override, str) or len(override) != ndim:
            raise MeshValueError(
                f"DeviceMesh: backend_override needs one value for each of {ndim} axes, got {override!r}"
            )
        override = dict(enumerate(override))
    options: dict[int, Any] = {}
    for key, value in override.items():
        axis = names.index(key) if names and key in names else key
        if not isinstance(axis, int) or not 0 <= axis < ndim or axis in options:
            expected = f"indices from 0 to {ndim - 1}" + (f" or names of {tuple(names)}" if names else "")
            raise MeshValueError(f"DeviceMesh: backend_override needs {expected}, each axis once, got {list(override)}")
        backend, chosen = (
            value if isinstance(value, tuple) else (value, None) if isinstance(value, str) else (None, value)
        )
        if backend is not None:
            _check_backend(key, str(backend))
        options[axis] = chosen
    return options


def _check_backend(key: Any, backend: str) -> None:
    start()
    default = get_platform().groups.backend()
    if backend.lower() != default:
        raise ValueError(
            f"DeviceMesh: backend_override has {backend!r} for axis {key!r}, but the groups of a mesh use the default"
            f" group's backend, {default!r}: leave it out, or start the ranks with init_process_group({backend!r})"
        )


def adopt(mesh: DeviceMesh, axis_groups: Sequence[Any]) -> None:
    """Give a mesh these groups, one per axis: see ``DeviceMesh.from_group``."""
    groups = get_platform().groups
    if mesh.ndim != len(axis_groups):
        raise ValueError(f"from_group: {len(axis_groups)} groups for a mesh of {mesh.ndim} axes")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"from_group: rank {mesh.get_rank()} is not in {mesh}; only members of the groups may call this"
        )
    for axis, group in enumerate(axis_groups):
        line, members = mesh._line(axis), groups.ranks(group)
        if sorted(line) != sorted(members):
            raise ValueError(f"from_group: axis {axis} has ranks {line}, but its group has {members}")
    groups.mark_created(axis_groups)
    mesh._groups = tuple(axis_groups)


def slice_of(root: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh | None:
    """Return a mesh as a slice of a root, or None if it is none."""
    if mesh.root == root:
        return mesh
    names = mesh.mesh_dim_names
    if not names or not set(names) <= {*(root.mesh_dim_names or ()), *root._flattened}:
        return None
    sliced = root[names]
    return sliced if sliced == mesh else None


def in_one_root(meshes: Sequence[DeviceMesh]) -> list[DeviceMesh] | None:
    """Return meshes as slices of one root, in their order; None if no root has them all."""
    for root in (*dict.fromkeys(mesh.root for mesh in meshes), *_roots(living())):
        if root.get_coordinate() is None:
            continue
        slices = [slice_of(root, mesh) for mesh in meshes]
        if None not in slices:
            return [each for each in slices if each is not None]
    return None


def _roots(meshes: Iterable[DeviceMesh]) -> list[DeviceMesh]:
    return [mesh for mesh in meshes if mesh.root is mesh]
