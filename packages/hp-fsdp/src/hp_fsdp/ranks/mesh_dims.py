"""The axes of data parallelism: named axes of a larger mesh, or all ranks if no mesh is passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_platform import get_platform

Names = str | tuple[str, ...] | None
ALL = ("dp_shard",)
"""Name of the axis of all ranks."""


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Names of the axes to shard over and of those to replicate over; several become one.

    Args:
        shard: one name or several.
        replicate: one name or several. Default: none.

    Raises:
        ValueError: neither is given.
    """

    shard: Names = None
    replicate: Names = None

    def __post_init__(self) -> None:
        if not (self.shard or self.replicate):
            raise ValueError("DataParallelMeshDims: name at least one axis, as shard= or replicate=")


def data_axes(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh | None:
    """Return the mesh of data parallelism inside the mesh of all axes.

    Args:
        mesh: the mesh of all axes.
        dims: a `DataParallelMeshDims`, or torch's; None if ``mesh`` is that of data parallelism.

    Raises:
        TypeError: ``dims`` of another type.
        ValueError: no mesh, no names, or names that the mesh lacks.
        NotImplementedError: no axis to shard over.
    """
    if dims is None:
        return mesh
    if type(dims).__name__ != "DataParallelMeshDims":
        raise TypeError(f"fully_shard: dp_mesh_dims must be a DataParallelMeshDims, got {type(dims).__name__}")
    if mesh is None or mesh.mesh_dim_names is None:
        what = "no mesh" if mesh is None else f"{mesh} without names"
        raise ValueError(f"fully_shard: dp_mesh_dims names axes of mesh, got {what}. Give mesh= with mesh_dim_names")
    shard, replicate = _tuple(dims.shard), _tuple(dims.replicate)
    unknown = [name for name in (*shard, *replicate) if name not in mesh.mesh_dim_names]
    if unknown:
        raise ValueError(f"fully_shard: dp_mesh_dims names {unknown}, the mesh has {mesh.mesh_dim_names}")
    if not shard:
        raise NotImplementedError(
            f"fully_shard: dp_mesh_dims names {replicate} to replicate over and no axis to shard over. For replicas"
            " alone use hp_fsdp.hsdp(module, shard_size=1), or name an axis of one rank as shard="
        )
    sharded = _one(mesh, shard)
    return DeviceMesh._concatenate([_one(mesh, replicate), sharded]) if replicate else sharded


def all_ranks(parameters: Sequence[Any]) -> DeviceMesh:
    """Return one axis of all ranks: the default mesh of `fully_shard`.

    Args:
        parameters: the group's, managed: with a name, and a layout if they have one.

    Raises:
        ValueError: parameters are distributed already, so not all ranks are of data parallelism; raised before any
            communication.
    """
    groups: Any = get_platform().groups
    if not groups.is_initialized():
        groups.init_process_group()
    size = groups.size()
    placed = [each for each in parameters if each.inner is not None and not _is_all(each.inner.mesh, size)]
    if placed:
        _refuse_all_ranks(placed, len(parameters), size)
    return init_device_mesh(get_platform().devices.kind, (size,), mesh_dim_names=ALL)


def _is_all(mesh: DeviceMesh, size: int) -> bool:
    return mesh.mesh_dim_names == ALL and mesh.size() == size


def _refuse_all_ranks(placed: Sequence[Any], count: int, size: int) -> None:
    inner = placed[0].inner
    root = inner.mesh.root
    if root.ndim > 1 and root.mesh_dim_names is not None:
        advice = (
            f"Pass the axes of data parallelism, those of {root.mesh_dim_names} over which the ranks have different"
            ' rows, such as fully_shard(module, mesh["dp"])'
        )
    else:
        advice = (
            "Its mesh has no named axis for data parallelism: make one that has, mesh ="
            ' init_device_mesh(..., mesh_dim_names=("dp", "tp")), parallelize on mesh["tp"] or on the full mesh, and'
            ' call fully_shard(module, mesh["dp"]). Where the ranks of its mesh are those of data parallelism, pass it'
        )
    raise ValueError(
        f"fully_shard: without a mesh a group is sharded over all {size} ranks, but {len(placed)} of its {count}"
        f" parameters are DTensors already, the first {placed[0].name!r}, placed {inner.placements} on {inner.mesh}."
        f" {advice}"
    )


def _tuple(names: Names) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
