"""How parameters lie on ranks, and the ranks that exchange matrices, as `hp_optim.muon.ownership` needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import axis_within, in_one_root
from hp_optim.muon.newton_schulz import Orthogonalization
from hp_optim.muon.ownership import OwnerPlan, Placed, assign
from hp_optim.muon.rules import Matrix
from hp_platform.extend import own_rank


def placed_as(
    name: str, shape: Sequence[int], spec: Any, matrices: tuple[Matrix, ...], settings: Orthogonalization
) -> Placed:
    """Describe a parameter to the planner.

    Args:
        name: for errors.
        shape: of a plain parameter; that of a DTensor is its spec's.
        spec: of a DTensor; None for a plain parameter.
        matrices: of which it is made.
        settings: of its orthogonalization.

    Raises:
        ValueError: a partial parameter.
    """
    if spec is None:
        return Placed(name, tuple(shape), matrices, (own_rank(),), (), (), settings)
    if spec.partial:
        raise ValueError(f"Muon: parameter {name!r} is placed {spec.placements}: reduce it before it is trained")
    ranks = tuple(spec.mesh.ranks.reshape(-1).tolist())
    return Placed(name, tuple(spec.shape), matrices, ranks, tuple(spec.mesh.shape), spec.placements, settings)


def owner_plan(placed: Sequence[Placed], meshes: set[DeviceMesh]) -> OwnerPlan:
    """Choose the owners of parameters' matrices.

    Args:
        placed: see `placed_as`.
        meshes: of these parameters.

    Raises:
        ValueError: the meshes are parts of different meshes.
    """
    return assign(placed, world_of(meshes) or [own_rank()])


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


def _around(meshes: set[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of the axes of all meshes; of axes that others were made of, the larger ones."""
    ordered = sorted(meshes, key=lambda mesh: (-mesh.ndim, mesh.mesh_dim_names or ()))
    slices = in_one_root(ordered)
    if slices is None or any(mesh.mesh_dim_names is None for mesh in slices):
        other = next((mesh for mesh in ordered if in_one_root([ordered[0], mesh]) is None), ordered[-1])
        raise ValueError(
            f"Muon: parameters are on {other} and on {ordered[0]}; one of them must have all ranks, or both must be"
            " slices, by name, of one mesh"
        )
    axes = [mesh[name] for mesh in slices for name in mesh.mesh_dim_names or ()]
    chosen: list[DeviceMesh] = []
    for axis in sorted(axes, key=lambda axis: -axis.size()):
        if not axis_within(axis._axes[0], [one._axes[0] for one in chosen]):
            chosen.append(axis)
    return DeviceMesh._concatenate(chosen)
