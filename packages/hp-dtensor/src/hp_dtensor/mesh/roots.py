"""The root that several meshes are slices of.

Note [Equal slices of different roots]
    Meshes are values: of equal slices of two roots, layouts keep the one that came first. So the root of a layout's
    mesh may be that of another model, and meshes of one model may have several. What matters is that there is a root
    that they all are slices of, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_dtensor.mesh.groups import living


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
