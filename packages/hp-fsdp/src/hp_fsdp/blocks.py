"""BlockLine: parameters that are cut in blocks along one axis, and over which ranks their blocks' sums are added.

Note [Norms by blocks]
    In deterministic mode a parameter is cut between blocks of `hp_fsdp.norms.BLOCK` elements only, so each block is
    whole on one rank. Its sum is formed by adding halves, elementwise, whose order no kernel and no shape changes. Each
    rank writes its blocks' sums into a vector that has a place for every block, zeros elsewhere, and the vectors are
    added over the ranks: x + 0 is exact in any order. Then every rank adds all blocks' sums, by halves again. What is
    sent is a 1024th of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from hp_dtensor import DeviceMesh
from hp_dtensor.extend import TensorSpec
from hp_fsdp.norms import BLOCK, spec_of

__all__ = ["BlockLine", "block_lines", "check_norm_type", "in_blocks", "mark_in_blocks"]


def mark_in_blocks(parameter: Any) -> None:
    """Notes on a sharded parameter that it is cut between blocks only."""
    parameter._hsdp_in_blocks = True


def in_blocks(parameters: Iterable[Any]) -> bool:
    """Whether the parameters are cut between blocks only.

    Raises:
        ValueError: some DTensors are, some not.
    """
    kinds = {getattr(each, "_hsdp_in_blocks", False) for each in parameters if spec_of(each) is not None}
    if len(kinds) > 1:
        raise ValueError(
            "global_grad_norm: some parameters are sharded with deterministic=True, some are not. Shard all of them"
            " with it, or call once for each kind"
        )
    return kinds == {True}


def check_norm_type(norm_type: float) -> None:
    """Raises for norms that no sum over blocks gives.

    Raises:
        NotImplementedError: it is neither 1 nor 2.
    """
    if norm_type not in (1.0, 2.0):
        raise NotImplementedError(
            f"global_grad_norm: norm_type={norm_type} is not the same for any number of ranks, as deterministic=True"
            " asks for. Use 1, 2 or inf"
        )


@dataclass(frozen=True, slots=True)
class BlockLine:
    """Parameters on one mesh that are cut along the same axis of it.

    Attributes:
        members: their places in the list of all.
        counts: how many blocks each has over all ranks of the line.
        firsts: number of the first block that this rank has of each.
        counted: whether this rank counts its blocks: of the ranks that hold the same, one does.
        group: the ranks of the line; None for one.
        others: groups of the axes over which the line's sum is added, one after the other.
    """

    members: tuple[int, ...]
    counts: tuple[int, ...]
    firsts: tuple[int, ...]
    counted: tuple[bool, ...]
    group: Any
    others: tuple[Any, ...]


def block_lines(specs: Sequence[TensorSpec | None], mesh: DeviceMesh) -> list[BlockLine]:
    """The lines of all parameters that are cut.

    Args:
        specs: the parameters' layouts; None for plain ones, which are in no line.
        mesh: what `joint_mesh` gave.
    """
    members: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, spec in enumerate(specs):
        if spec is not None:
            members.setdefault((spec.mesh, _ragged_axis(spec)), []).append(index)
    return [_line(own, axis, indices, specs, mesh) for (own, axis), indices in members.items()]


def _line(own: DeviceMesh, axis: int, members: Sequence[int], specs: Sequence[Any], mesh: DeviceMesh) -> BlockLine:
    rank = own.get_local_rank(axis)
    # Ranks that differ in the axes of data parallelism only (up to `axis`) find the same; over the others it is added.
    others = _other_axes(own, axis, mesh)
    place = mesh.get_coordinate() or ()
    counts, firsts, counted = [], [], []
    for spec in (specs[index] for index in members):
        units = spec.placements[axis].units
        start = sum(units[:rank])
        assert start % BLOCK == 0 or units[rank] == 0, (start, units)
        counts.append(ceil(sum(units) / BLOCK))
        firsts.append(start // BLOCK)
        counted.append(all(place[other] == 0 or _is_sharded(spec, mesh, other) for other in others))
    return BlockLine(
        tuple(members),
        tuple(counts),
        tuple(firsts),
        tuple(counted),
        own.get_group(axis) if own.size(axis) > 1 else None,
        tuple(mesh.get_group(other) for other in others if mesh.size(other) > 1),
    )


def _ragged_axis(spec: Any) -> int:
    return next(axis for axis, placement in enumerate(spec.placements) if hasattr(placement, "units"))


def _other_axes(own: DeviceMesh, axis: int, mesh: DeviceMesh) -> list[int]:
    if own == mesh:
        return list(range(axis + 1, mesh.ndim))
    data = set((own.mesh_dim_names or ())[: axis + 1])
    return [index for index, name in enumerate(mesh.mesh_dim_names or ()) if name not in data]


def _is_sharded(spec: Any, mesh: DeviceMesh, axis: int) -> bool:
    if spec.mesh == mesh:
        return not spec.placements[axis].is_replicate()
    name = mesh.mesh_dim_names[axis]  # type: ignore[index]
    names = spec.mesh.mesh_dim_names or ()
    return name in names and not spec.placements[names.index(name)].is_replicate()
