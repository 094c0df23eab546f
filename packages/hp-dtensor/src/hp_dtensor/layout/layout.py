"""Layout: placements written by tensor dim, ``layout("dp", "tp")``, equal to a mesh and placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_dtensor.errors import NoPlacementsError
from hp_dtensor.layout.placements import Placement, Replicate, Shard, StridedShard, kind_of
from hp_dtensor.mesh.device_mesh import DeviceMesh


class Layout:
    """Ranks along named axes, and the axes that shard each tensor dim.

    ``Layout(mesh_shape, mesh_dim_names)`` describes the ranks. Calling it with the axis (or axes, the outer first, or
    ``"None"``) of each tensor dim returns the layout of a tensor. It needs no process group until a tensor uses it.

    Example:
        >>> layout = Layout((2, 4), ("dp", "tp"))
        >>> layout("dp", "tp").placements
        (Shard(0), Shard(1))
        >>> layout(("dp", "tp"), "None").placements
        (Shard(0), Shard(0))
        >>> layout().placements
        (Replicate(), Replicate())

    Args:
        mesh_shape: ranks along each axis.
        mesh_dim_names: the axes' names.
        rank_list: the ranks in row-major order; default ``0 .. n-1``.

    Raises:
        ValueError: sizes that do not fit, unknown or repeated axis names.
    """

    __slots__ = ("_key", "mesh_dim_names", "mesh_shape", "ndim", "placements", "rank_list")

    def __init__(
        self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> None:
        self.mesh_shape = tuple(int(size) for size in mesh_shape)
        self.mesh_dim_names = tuple(mesh_dim_names)
        count = math.prod(self.mesh_shape)
        self.rank_list = tuple(range(count)) if rank_list is None else tuple(int(rank) for rank in rank_list)
        if len(self.mesh_dim_names) != len(self.mesh_shape):
            raise ValueError(
                f"Layout: {len(self.mesh_dim_names)} names {self.mesh_dim_names} for mesh_shape {self.mesh_shape}"
            )
        if len(set(self.mesh_dim_names)) != len(self.mesh_dim_names) or "None" in self.mesh_dim_names:
            raise ValueError(f"Layout: mesh_dim_names must be unique and not 'None', got {self.mesh_dim_names}")
        if len(self.rank_list) != count or len(set(self.rank_list)) != count:
            raise ValueError(
                f"Layout: mesh_shape {self.mesh_shape} needs {count} different ranks, rank_list has {self.rank_list}"
            )
        self.placements: tuple[Placement, ...] | None = None
        self.ndim: int | None = None
        self._key: Any = None
        self._seal()

    def _seal(self) -> None:
        self._key = (self.mesh_shape, self.mesh_dim_names, self.rank_list, self.placements)

    def _placed(self, placements: tuple[Placement, ...], ndim: int | None) -> Layout:
        layout = Layout(self.mesh_shape, self.mesh_dim_names, self.rank_list)
        layout.placements, layout.ndim = placements, ndim
        layout._seal()
        return layout

    def __call__(self, *dims: str | Sequence[str]) -> Layout:
        """Return the layout of a tensor whose dim ``k`` is sharded by ``dims[k]``; replicated without arguments."""
        placements: list[Placement] = [Replicate()] * len(self.mesh_shape)
        used: set[str] = set()
        for dim, axis_or_axes in enumerate(dims):
            if not isinstance(axis_or_axes, (str, list, tuple)):
                raise TypeError(
                    f"layout: dim {dim} of {dims} is {axis_or_axes!r}; pass the mesh axis that shards it, a tuple of"
                    " axes, or 'None' if none does"
                )
            axes = []
            for name in (axis_or_axes,) if isinstance(axis_or_axes, str) else axis_or_axes:
                if name == "None":
                    continue
                if name not in self.mesh_dim_names:
                    raise ValueError(f"layout: unknown axis {name!r}; the axes are {self.mesh_dim_names} (or 'None')")
                if name in used:
                    raise ValueError(f"layout: axis {name!r} shards two dims of {dims}")
                used.add(name)
                axes.append(self.mesh_dim_names.index(name))
            for position, axis in enumerate(axes):
                # An axis that is named before this one but comes later in the mesh is the outer one, so this axis
                # shards each of its blocks.
                outer = math.prod(self.mesh_shape[a] for a in axes[:position] if a > axis)
                placements[axis] = Shard(dim) if outer == 1 else StridedShard(dim, outer)
        return self._placed(tuple(placements), len(dims) or None)

    @staticmethod
    def of(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int | None = None) -> Layout:
        """Return the layout equivalent to a mesh and placements."""
        names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
        layout = Layout(mesh.shape, names, [int(rank) for rank in mesh.ranks.reshape(-1)])
        return layout._placed(tuple(placements), ndim)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh of this layout's ranks, with its process groups: every rank of it must call this."""
        return DeviceMesh(device_type, np.array(self.rank_list).reshape(self.mesh_shape), self.mesh_dim_names)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple) and len(other) == 2 and isinstance(other[0], DeviceMesh):
            other = Layout.of(other[0], other[1])
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        text = f"Layout({self.mesh_shape}, {self.mesh_dim_names}"
        if self.rank_list != tuple(range(len(self.rank_list))):
            text += f", rank_list={self.rank_list}"
        text += ")"
        if self.placements is None:
            return text
        if self.ndim is None or any(type(p) not in (Shard, Replicate) for p in self.placements):
            return f"{text} with {self.placements}"
        dims = []
        for dim in range(self.ndim):
            names = [n for n, p in zip(self.mesh_dim_names, self.placements, strict=True) if p == Shard(dim)]
            dims.append(repr(tuple(names)) if len(names) > 1 else repr(names[0] if names else "None"))
        return f"{text}({', '.join(dims)})"


def as_placements(
    device_mesh: DeviceMesh | Layout | None,
    placements: Sequence[Placement] | None,
    default: DeviceMesh | None,
    what: str,
    device_type: str | None = None,
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Read ``(mesh, placements)`` or a Layout, the two forms that public functions accept.

    Raises:
        TypeError: neither a mesh nor a Layout.
        ValueError: a Layout together with placements, or a Layout of ranks only.
    """
    if isinstance(device_mesh, Layout):
        if placements is not None:
            raise ValueError(f"{what}: a Layout has placements already; do not pass both")
        if device_mesh.placements is None:
            raise ValueError(f"{what}: {device_mesh!r} describes ranks only; call it with the axis of each tensor dim")
        kind = device_type or (default.device_type if default is not None else "cpu")
        mesh = device_mesh.device_mesh(kind)
        return (default if default == mesh and default is not None else mesh), device_mesh.placements
    mesh = device_mesh if device_mesh is not None else default
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{what}: device_mesh must be a DeviceMesh or a Layout of hp_dtensor, got a {kind_of(mesh)}; create it with"
            " hp_dtensor.init_device_mesh"
        )
    if placements is None:
        if what == "redistribute":
            raise NoPlacementsError("redistribute: pass the target, placements= or a Layout; [Replicate()] gathers")
        return mesh, (Replicate(),) * mesh.ndim
    return mesh, tuple(placements) if not isinstance(placements, Placement) else placements  # type: ignore[return-value]
