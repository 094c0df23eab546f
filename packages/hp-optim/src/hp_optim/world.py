"""The ranks that exchange matrices."""

from __future__ import annotations

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import axis_within
from hp_platform import get_platform

__all__ = ["own_rank", "world_of"]


def world_of(meshes: set[DeviceMesh]) -> list[int]:
    """List the ranks of all meshes, alike on all of them: of the smallest mesh that has them all.

    Args:
        meshes: of an optimizer's parameters.

    Raises:
        ValueError: none of them has all ranks, and they are not slices, by name, of one mesh.
    """
    sets = {mesh: frozenset(mesh.ranks.reshape(-1).tolist()) for mesh in meshes}
    for ranks in sets.values():
        if all(other <= ranks for other in sets.values()):
            return sorted(ranks)
    return sorted(_around(meshes).ranks.reshape(-1).tolist()) if meshes else []


def own_rank() -> int:
    """Return this process's rank, 0 where there are no groups."""
    groups = get_platform().groups
    return groups.rank() if groups.is_initialized() else 0


def _around(meshes: set[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of the axes of all meshes; of axes that others were made of, the larger ones."""
    ordered = sorted(meshes, key=lambda mesh: (-mesh.ndim, mesh.mesh_dim_names or ()))
    axes: list[DeviceMesh] = []
    for mesh in ordered:
        if mesh.mesh_dim_names is None or mesh.root != ordered[0].root:
            raise ValueError(
                f"Muon: parameters are on {mesh} and on {ordered[0]}; one of them must have all ranks, or both must be"
                " slices, by name, of one mesh"
            )
        axes += [mesh[name] for name in mesh.mesh_dim_names]
    chosen: list[DeviceMesh] = []
    for axis in sorted(axes, key=lambda axis: -axis.size()):
        if not axis_within(axis._axes[0], [one._axes[0] for one in chosen]):
            chosen.append(axis)
    return DeviceMesh._concatenate(chosen)
