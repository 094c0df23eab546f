"""Sub-meshes: slices, flattened and split axes. The functions implement DeviceMesh's methods of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hp_dtensor.errors import MeshValueError, OverlapError
from hp_dtensor.mesh.axes import axes_overlap, axis_within, ranks_along, read_names, split_axis

if TYPE_CHECKING:
    from hp_dtensor.mesh.device_mesh import DeviceMesh

__all__ = ["axes_within", "concatenate", "flatten", "join", "unflatten"]


def join(mesh: DeviceMesh, names: Sequence[str], located: Sequence[tuple[DeviceMesh, int]]) -> DeviceMesh:
    """Return the mesh of these axes of sub-meshes of ``mesh``'s root."""
    root, axes = mesh.root, tuple(each._axes[axis] for each, axis in located)
    if axes_overlap(axes):
        raise OverlapError(f"axes {tuple(names)} of {root} overlap: no rank may lie on two of them")
    coordinate = root.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank {mesh.get_rank()} is not in {mesh}: it has no sub-mesh there")
    position = int(np.ravel_multi_index(coordinate, root.shape))
    submesh = mesh._derived(ranks_along(root.ranks, position, axes), names, axes)
    if all(each._groups is not None for each, _ in located):
        submesh._groups = tuple(each.get_group(axis) for each, axis in located)
    return submesh


def flatten(mesh: DeviceMesh, mesh_dim_name: str | None) -> DeviceMesh:
    """Implement ``DeviceMesh._flatten``."""
    name = mesh_dim_name or "_".join(mesh.mesh_dim_names or ())
    if not name:
        raise RuntimeError("_flatten: give mesh_dim_name, this mesh has no mesh_dim_names to join")
    if mesh.mesh_dim_names == (name,):
        return mesh
    root, ranks = mesh.root, mesh.ranks.reshape(-1)
    if name in (root.mesh_dim_names or ()):
        raise ValueError(f"_flatten: {name!r} is already an axis of the root mesh {root.mesh_dim_names}")
    axis, flattened = tuple(term for each in mesh._axes for term in each), root._flattened.get(name)
    if flattened is not None and flattened._axes != (axis,):
        raise ValueError(
            f"_flatten: {name!r} is already the name of ranks {flattened.ranks.tolist()}, asked for {ranks.tolist()};"
            " choose another name"
        )
    if flattened is None:
        flattened = root._flattened[name] = mesh._derived(ranks, (name,), (axis,), init_groups=mesh._groups is not None)
    return flattened


def unflatten(
    mesh: DeviceMesh, dim: int | str, sizes: tuple[int, ...], mesh_dim_names: Sequence[str] | None
) -> DeviceMesh:
    """Implement ``DeviceMesh._unflatten``."""
    axis, names = mesh.axis(dim), None
    if (mesh_dim_names is None) != (mesh.mesh_dim_names is None):
        raise ValueError(f"_unflatten: mesh_dim_names {mesh_dim_names} for a mesh with names {mesh.mesh_dim_names}")
    if mesh.mesh_dim_names is not None and mesh_dim_names is not None:
        if len(mesh_dim_names) != len(sizes):
            raise MeshValueError(
                f"_unflatten: {len(mesh_dim_names)} mesh_dim_names for {len(sizes)} mesh_sizes {sizes}"
            )
        names = (*mesh.mesh_dim_names[:axis], *mesh_dim_names, *mesh.mesh_dim_names[axis + 1 :])
    split_axes = split_axis(mesh._axes[axis], sizes) if min(sizes, default=0) > 0 else None
    if split_axes is None:
        raise ValueError(
            f"_unflatten: sizes {sizes} do not fit axis {dim!r} of size {mesh.shape[axis]}: their product must be its"
            " size, and a flattened axis can only be split where its axes were joined"
        )
    ranks = mesh.ranks.reshape(*mesh.shape[:axis], *sizes, *mesh.shape[axis + 1 :])
    axes = (*mesh._axes[:axis], *split_axes, *mesh._axes[axis + 1 :])
    return mesh._derived(ranks, names, axes, init_groups=mesh._groups is not None)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Implement ``DeviceMesh._concatenate``."""
    if not meshes or any(mesh.root != meshes[0].root or mesh.mesh_dim_names is None for mesh in meshes):
        raise MeshValueError(f"_concatenate: pass sub-meshes with names of one root mesh; got {list(meshes)}")
    located = [(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]
    names = read_names([name for mesh in meshes for name in mesh.mesh_dim_names or ()], (1,) * len(located))
    return join(meshes[0], names or (), located)


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
