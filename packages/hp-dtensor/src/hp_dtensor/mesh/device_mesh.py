"""DeviceMesh: ranks arranged along named axes, with a process group for each line of ranks along an axis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from hp_dtensor import port
from hp_dtensor.mesh import axes as mesh_axes
from hp_dtensor.mesh import groups as mesh_groups
from hp_dtensor.mesh.axes import AxisLayout, MeshValueError, axis_layouts, find_axis, read_names, read_ranks
from hp_platform import get_platform
from hp_platform.extend import own_rank

_active = threading.local()


class DeviceMesh:
    """An n-d arrangement of ranks, in any order.

    Meshes are values: equal, with equal hashes, if device type, ranks, shape and axis names are equal. Creating a mesh
    creates a process group for each axis (unless ``_init_groups=False``), and the default group if there is none.
    Groups are cached by rank set, so meshes over the same ranks share communicators. The accelerator that a launcher
    has assigned becomes the current one, unless the process has used one already.

    A rank's index along an axis is its index in ``mesh``. Its rank in the axis's group follows the global order, which
    differs if the ranks do not ascend: see ``group_order``.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))   # on 4 ranks
        >>> mesh["tp"].size()
        2

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh: global ranks as a (nested) list or array; its shape is the mesh's shape. Ranks must be unique.
        mesh_dim_names: one unique name per axis.
        backend_override: options of the axes' groups, by the axis's name or index, or one value per axis:
            GroupOptions, the backend's own, or ``(backend, options)``. The backend must be the default group's.

    Attributes:
        ranks: the global ranks, a read-only numpy array.

    Raises:
        TypeError: ranks that are not integers, or names that are not strings.
        ValueError: no ranks, repeated ranks, ranks outside the world, repeated names, a different number of names than
            of axes, or another backend. Also a RuntimeError where torch raises that.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        backend_override: Any = None,
        _init_groups: bool = True,
        _root: DeviceMesh | None = None,
        _axes: tuple[AxisLayout, ...] | None = None,
    ) -> None:
        ranks = read_ranks(mesh)
        self.device_type = device_type
        self.ranks = ranks
        self.shape: tuple[int, ...] = tuple(ranks.shape)
        self.mesh_dim_names = names = read_names(mesh_dim_names, self.shape)
        self.root: DeviceMesh = _root if _root is not None else self
        self._axes = _axes if _axes is not None else axis_layouts(self.shape)
        self._flattened: dict[str, DeviceMesh] = {}
        self._key = (device_type, self.shape, tuple(ranks.reshape(-1).tolist()), names)
        self._hash = hash(self._key)
        self._groups: tuple[Any, ...] | None = None
        self._options = mesh_groups.read_options(backend_override, names, len(self.shape))
        self._rank: int | None = None
        self._coordinate: tuple[int, ...] | None = None
        if _init_groups:
            self._make_groups()
        self._locate()
        mesh_groups.note(self)

    def _locate(self) -> None:
        """Find this rank's coordinate; until there is a default group, use that of rank 0."""
        rank = own_rank()
        position = np.argwhere(self.ranks == rank)
        self._coordinate = tuple(int(i) for i in position[0]) if len(position) else None
        self._rank = rank if get_platform().groups.is_initialized() else None

    # ---- values ----
    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, DeviceMesh) and self._hash == other._hash and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device_type!r}, {self.ranks.tolist()}{names})"

    def __reduce__(self) -> tuple[Any, ...]:
        root = self.root if self.root is not self else None
        arguments = (self.device_type, self.ranks.tolist(), self.mesh_dim_names, root, self._axes)
        return _rebuild, arguments, {"_flattened": self._flattened} if self._flattened else None

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ---- shape and coordinate ----
    @property
    def mesh(self) -> Any:
        """The ranks as a new tensor of the framework on the host; see ``ranks``."""
        return port.ranks().rank_tensor(self.ranks)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks of the mesh, or along one axis."""
        if mesh_dim is None:
            return int(self.ranks.size)
        mesh, axis = self._find(mesh_dim)
        return mesh.shape[axis]

    def get_device_num_along_axis(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return self.size(name)

    def axis(self, mesh_dim: int | str) -> int:
        """Return the index of an axis, passed by index or by name; see ``find_axis`` for the errors."""
        return find_axis(mesh_dim, self.mesh_dim_names or (), self.shape, self._within)

    def _within(self) -> dict[str, DeviceMesh]:
        """Return the flattened meshes, by name, whose axes this mesh has."""
        mine = {term for axis in self._axes for term in axis}
        return {name: flat for name, flat in self.root._flattened.items() if mine.issuperset(flat._axes[0])}

    def _find(self, mesh_dim: int | str) -> tuple[DeviceMesh, int]:
        """Return the mesh, this one or a flattened one, that has an axis, and the axis's index there."""
        if isinstance(mesh_dim, str) and mesh_dim not in (self.mesh_dim_names or ()):
            flat = self._within().get(mesh_dim)
            if flat is not None:
                return flat, 0
        return self, self.axis(mesh_dim)

    def get_rank(self) -> int:
        """Return this process's global rank; 0 until there is a default group."""
        if self._rank is None and get_platform().groups.is_initialized():
            self._locate()
        return self._rank or 0

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's index on each axis; None if the rank is not in the mesh."""
        if self._rank is None and get_platform().groups.is_initialized():
            self._locate()
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's index along an axis (optional on a mesh of one axis).

        Raises:
            RuntimeError: ``mesh_dim=None`` on a mesh of several axes, or this rank is not in the mesh.
        """
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(
                    f"get_local_rank: pass an axis; the mesh has {self.ndim}: {self.mesh_dim_names or self.shape}"
                )
            mesh_dim = 0
        mesh, axis = self._find(mesh_dim)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {self.get_rank()} is not in {self}")
        return coordinate[axis]

    # ---- groups ----
    def _make_groups(self) -> None:
        mesh_groups.start()
        mesh_groups.check_world(self)
        own_axes = range(self.ndim) if self.get_coordinate() is not None else ()
        new_group = get_platform().groups.new_group
        self._groups = tuple(new_group(self._line(axis), pg_options=self._options.get(axis)) for axis in own_axes)

    def _line(self, axis: int) -> list[int]:
        """Return the ranks along an axis, through this one."""
        index: list[Any] = list(self.get_coordinate() or ())
        index[axis] = slice(None)
        return self.ranks[tuple(index)].tolist()

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the process group of the ranks along an axis through this one (optional on a mesh of one axis).

        Raises:
            RuntimeError: ``mesh_dim=None`` on a mesh of several axes, or this rank is not in the mesh.
        """
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(
                    f"get_group: pass an axis; the mesh has {self.ndim}: {self.mesh_dim_names or self.shape}. For the"
                    " groups of all axes, call get_all_groups()"
                )
            mesh_dim = 0
        mesh, axis = self._find(mesh_dim)
        if mesh._groups is None:
            mesh._make_groups()
        if not mesh._groups:
            raise RuntimeError(f"rank {self.get_rank()} is not in {self}: it has no group there")
        return mesh._groups[axis]

    def group_order(self, mesh_dim: int | str) -> tuple[int, ...] | None:
        """Return the axis index of each rank of an axis's group, in the group's order; None if that is 0, 1, 2, ...

        Collectives gather and scatter in the group's order.

        Example:
            >>> DeviceMesh("cpu", [2, 0, 1]).group_order(0)    # the group has ranks 0, 1, 2
            (1, 2, 0)
        """
        axis = self.axis(mesh_dim)
        if self.get_coordinate() is None or self.shape[axis] == 1:
            return None
        line = self._line(axis)
        order = tuple(line.index(rank) for rank in get_platform().groups.ranks(self.get_group(axis)))
        return None if order == tuple(range(len(line))) else order

    def get_all_groups(self) -> list[Any]:
        """Return the groups of all axes."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    # ---- sub-meshes ----
    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the sub-mesh of the named axes that contains this rank, axes in the order of ``names``.

        Names are those of this mesh, and of flattened axes if it has all that they were flattened from.

        Raises:
            KeyError: unknown or repeated names, or overlapping axes, such as a flattened axis and one of its parts.
            RuntimeError: the mesh has no names, or this rank is not in it.
        """
        requested = (names,) if isinstance(names, str) else tuple(names)
        if self.mesh_dim_names is None:
            raise RuntimeError(f"cannot slice by name {requested}: this mesh has no mesh_dim_names")
        if requested == self.mesh_dim_names:
            return self
        if len(set(requested)) != len(requested):
            raise KeyError(f"axis names must not repeat, got {requested}")
        if not requested:
            raise KeyError(f"name at least one axis of {self.mesh_dim_names}")
        located = [self._find(name) for name in requested]
        if len(located) == 1 and located[0][0] is not self:
            return located[0][0]
        return mesh_axes.join(self, requested, located)

    def _derived(
        self, ranks: Any, names: Sequence[str] | None, axes: tuple[AxisLayout, ...], *, init_groups: bool = False
    ) -> DeviceMesh:
        return DeviceMesh(self.device_type, ranks, names, _init_groups=init_groups, _root=self.root, _axes=axes)

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Merge all axes into one, also reachable as ``root[mesh_dim_name]`` afterwards.

        Args:
            mesh_dim_name: the new axis's name; default the names joined by ``_``. A mesh whose only axis has that name
                is returned unchanged.

        Raises:
            ValueError: the name is taken, by an axis of the root mesh or by a flattened axis over other ranks.
            RuntimeError: neither a name nor axis names to join.
        """
        return mesh_axes.flatten(self, mesh_dim_name)

    def _unflatten(
        self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """Split one axis into several.

        Args:
            dim: the axis, by index or name.
            mesh_sizes: sizes of the new axes, the outer first; their product is the axis's size.
            mesh_dim_names: their names; required if the mesh has names.

        Raises:
            ValueError: sizes or names that do not fit the axis or each other.
            KeyError, IndexError: no such axis.
        """
        return mesh_axes.unflatten(self, dim, tuple(mesh_sizes), mesh_dim_names)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh of all axes of sub-meshes of one root, in that order.

        Raises:
            ValueError: no meshes, meshes of different roots or without names.
            KeyError: axes that share ranks.
        """
        return mesh_axes.concatenate(list(device_mesh_list))

    @staticmethod
    def from_group(
        group: Any, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """Return a mesh over existing process groups: one group, or a list with one for each axis of ``mesh``.

        Raises:
            ValueError: no group, several groups without ``mesh``, or an axis whose ranks are not its group's.
        """
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        if not groups:
            raise ValueError("from_group: at least one process group is needed, got an empty list")
        if len(groups) == 1 and mesh is None:
            mesh = get_platform().groups.ranks(groups[0])
        if mesh is None:
            raise ValueError(f"from_group: {len(groups)} groups need mesh=, the ranks in {len(groups)} axes")
        result = DeviceMesh(device_type, mesh, mesh_dim_names, _init_groups=False)
        mesh_groups.adopt(result, groups)
        return result

    # ---- context ----
    def __enter__(self) -> DeviceMesh:
        if not hasattr(_active, "stack"):
            _active.stack = []
        _active.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _active.stack.pop()


def _rebuild(kind: str, ranks: Any, names: Any, root: DeviceMesh | None = None, axes: Any = None) -> DeviceMesh:
    return DeviceMesh(kind, ranks, names, _init_groups=False, _root=root, _axes=axes)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
    *,
    backend_override: Any = None,
) -> DeviceMesh:
    """Create a mesh over the first ranks in order: rank ``r`` is at ``numpy.unravel_index(r, mesh_shape)``.

    Initialises the default process group if there is none. For other ranks, or another order, call ``DeviceMesh``.

    A mesh may be smaller than the world, as with torch, and nothing is said of it: ranks beyond the product of
    ``mesh_shape`` are not in the mesh, have no coordinate, and hold nothing of a tensor that is distributed over it.
    On such a rank a slice of the mesh, ``fully_shard`` and ``parallelize_module`` are refused by name.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh_shape: size of each axis; the product is at most the world size.
        mesh_dim_names: one name per axis.
        backend_override: options of the axes' groups, as for ``DeviceMesh``.

    Raises:
        TypeError: names that are not strings.
        ValueError: the product of ``mesh_shape`` exceeds the world size, names do not fit it, or ``device_type`` has
            an index (each also a RuntimeError, as torch raises).
    """
    if not device_type.isalpha():
        kind = device_type.partition(":")[0]
        raise MeshValueError(
            f"init_device_mesh: device_type {device_type!r} names one device; pass the kind, {kind!r}: "
            "each rank uses the current device of that kind"
        )
    shape = tuple(int(size) for size in ((mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape))
    names = read_names(mesh_dim_names, shape)
    mesh_groups.start()
    world = get_platform().groups.size()
    need = prod(shape)
    if min(shape, default=0) < 1:
        raise MeshValueError(f"init_device_mesh: the sizes of mesh_shape must be positive, got {shape}")
    if need > world:
        raise MeshValueError(
            f"init_device_mesh: mesh_shape {shape} has {need} ranks, but the world has {world} ranks; "
            f"start {need} ranks or change the shape{mesh_groups.advice_for(need)}"
        )
    return DeviceMesh(device_type, np.arange(need).reshape(shape), names, backend_override=backend_override)


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost active ``with mesh:``.

    Raises:
        RuntimeError: none is active.
    """
    stack = getattr(_active, "stack", None)
    if not stack:
        raise RuntimeError("no mesh is active: pass device_mesh, or call inside `with mesh:`")
    return stack[-1]
