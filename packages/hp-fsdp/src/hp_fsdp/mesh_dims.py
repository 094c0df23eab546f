"""DataParallelMeshDims: which axes of a whole mesh are those of data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_dtensor.mesh import DeviceMesh

__all__ = ["DataParallelMeshDims", "data_axes"]

Names = str | tuple[str, ...] | None


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
    """The mesh of data parallelism that is in a whole mesh.

    Args:
        mesh: the whole mesh.
        dims: a `DataParallelMeshDims`, or torch's; None: ``mesh`` is that of data parallelism.

    Raises:
        TypeError: ``dims`` is something else.
        ValueError: no mesh, no names, or names that the mesh has not.
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


def _tuple(names: Names) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
