"""Whose part counts in a norm over all parameters, and over which ranks it is summed."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import TensorSpec, within

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
    own = spec.mesh if spec is not None else mesh
    replicated = [axis for axis in range(own.ndim) if spec is None or spec.placements[axis].is_replicate()]
    first = not any((own.get_coordinate() or (0,) * own.ndim)[axis] for axis in replicated)
    others = [axis for axis in range(mesh.ndim) if own != mesh and not within(mesh._axes[axis], own._axes)]
    return first and not any((mesh.get_coordinate() or (0,) * mesh.ndim)[axis] for axis in others)


def _joint(meshes: set[DeviceMesh]) -> DeviceMesh:
    if len(meshes) == 1:
        return next(iter(meshes))
    ordered = sorted(meshes, key=lambda mesh: (-mesh.ndim, mesh.mesh_dim_names or ()))
    largest, axes = ordered[0], [(mesh, axis) for mesh in ordered for axis in range(mesh.ndim)]
    for mesh in ordered:
        if mesh.mesh_dim_names is None or mesh.root != largest.root:
            raise ValueError(
                f"global_grad_norm: parameters are on {mesh} and on {largest}; both must be slices, by name, of one"
                " mesh"
            )
    # Axes that were made of others, or split: the larger ones have all ranks.
    chosen: list[DeviceMesh] = []
    for mesh, axis in sorted(axes, key=lambda each: -each[0].shape[each[1]]):
        if not within(mesh._axes[axis], [one._axes[0] for one in chosen]):
            chosen.append(mesh[mesh.mesh_dim_names[axis]])  # type: ignore[index]
    if not chosen:
        return largest
    root = largest.root
    whole = all(within(digits, [one._axes[0] for one in chosen]) for digits in root._axes)
    return root if whole else DeviceMesh._concatenate(chosen)


def joint_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """The smallest mesh that has the ranks of all."""
    return _joint(set(meshes)) if meshes else None
