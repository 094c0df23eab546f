"""Whose part counts in a norm over all parameters, and over which ranks it is summed."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.spec import TensorSpec

__all__ = ["BLOCK", "counts", "joint_mesh", "spec_of"]

BLOCK = 1024
"""In deterministic mode, parameters are cut between blocks of this many elements, and norms are sums over blocks."""


def spec_of(tensor: object) -> TensorSpec | None:
    """The layout of a DTensor; None of a plain tensor."""
    return getattr(tensor, "_spec", None)


def counts(spec: TensorSpec | None, mesh: DeviceMesh | None) -> bool:
    """Whether this rank counts its part of a tensor: it is the first of those that hold the same.

    Args:
        spec: the tensor's layout; None for a plain one, which counts as replicated.
        mesh: what `joint_mesh` gave.
    """
    if mesh is None:
        return True
    sharded = set()
    if spec is not None:
        if spec.mesh == mesh:
            sharded = {axis for axis, placement in enumerate(spec.placements) if not placement.is_replicate()}
        else:
            sharded = {
                mesh.axis(spec.mesh.mesh_dim_names[axis])  # type: ignore[index]
                for axis, placement in enumerate(spec.placements)
                if not placement.is_replicate()
            }
    coordinate = mesh.get_coordinate() or ()
    return all(place == 0 for axis, place in enumerate(coordinate) if axis not in sharded)


def joint_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """The smallest mesh that has the axes of all."""
    if not meshes:
        return None
    largest = max(meshes, key=lambda mesh: mesh.ndim)
    names: list[str] = []
    for mesh in dict.fromkeys(meshes):
        if mesh == largest and len(set(meshes)) == 1:
            return mesh
        if mesh.mesh_dim_names is None or mesh.root != largest.root:
            raise ValueError(
                f"global_grad_norm: parameters are on {mesh} and on {largest}; both must be slices, by name, of one"
                " mesh"
            )
        names += [name for name in mesh.mesh_dim_names if name not in names]
    return largest.root[tuple(names)]
