"""A mesh of the first ranks, and how meshes lie in each other and in a common root.

Note [Equal slices of different roots]
    Meshes are values: of equal slices of two roots, layouts keep the one that came first. So the root of a layout's
    mesh may be that of another model, and meshes of one model may have several. What matters is that there is a root
    that they all are slices of, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from hp_dtensor.mesh.axes import MeshValueError, advice_for, axis_within, read_names, start
from hp_dtensor.mesh.device_mesh import DeviceMesh, living
from hp_platform import get_platform


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
    *,
    backend_override: Any = None,
) -> DeviceMesh:
    """Create a mesh over the first ranks in order: rank ``r`` is at ``numpy.unravel_index(r, mesh_shape)``.

    Initialises the default process group if there is none. For other ranks, or another order, call ``DeviceMesh``.

    A mesh may be smaller than the world, as with torch, and nothing is said of it: ranks beyond the product of
    ``mesh_shape`` are not in the mesh, have no coordinate, and hold nothing of a tensor that is distributed over it.
    On such a rank a slice of the mesh, ``fully_shard`` and ``parallelize_module`` are refused by name.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh_shape: size of each axis; the product is at most the world size.
        mesh_dim_names: one name per axis.
        backend_override: options of the axes' groups, as for ``DeviceMesh``.

    Raises:
        TypeError: names that are not strings.
        ValueError: the product of ``mesh_shape`` exceeds the world size, names do not fit it, or ``device_type`` has
            an index (each also a RuntimeError, as torch raises).
    """
    if not device_type.isalpha():
        kind = device_type.partition(":")[0]
        raise MeshValueError(
            f"init_device_mesh: device_type {device_type!r} names one device; pass the kind, {kind!r}: "
            "each rank uses the current device of that kind"
        )
    shape = tuple(int(size) for size in ((mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape))
    names = read_names(mesh_dim_names, shape)
    start()
    world = get_platform().groups.size()
    need = prod(shape)
    if min(shape, default=0) < 1:
        raise MeshValueError(f"init_device_mesh: the sizes of mesh_shape must be positive, got {shape}")
    if need > world:
        raise MeshValueError(
            f"init_device_mesh: mesh_shape {shape} has {need} ranks, but the world has {world} ranks; "
            f"start {need} ranks or change the shape{advice_for(need)}"
        )
    return DeviceMesh(device_type, np.arange(need).reshape(shape), names, backend_override=backend_override)


def check_member(mesh: DeviceMesh, what: str) -> None:
    """Refuse a rank that is not in the mesh.

    Args:
        mesh: the mesh.
        what: function that is called there, for the error.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{what}: rank {mesh.get_rank()} is not in {mesh}; call it on the ranks of the mesh alone, or"
            " make a mesh of all ranks"
        )


def axes_within(mesh: DeviceMesh, outer: DeviceMesh) -> tuple[int, ...]:
    """Return the axes of ``mesh`` that lie on those of ``outer``; both are sub-meshes of one root.

    An axis of one rank lies on every mesh, so its name decides.

    Example:
        >>> axes_within(root, root["dp"])       # of a root ("dp", "tp")
        (0,)
    """
    return tuple(
        axis
        for axis, terms in enumerate(mesh._axes)
        if (
            axis_within(terms, outer._axes)
            if mesh.shape[axis] > 1
            else (mesh.mesh_dim_names or range(mesh.ndim))[axis] in (outer.mesh_dim_names or range(outer.ndim))
        )
    )


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
