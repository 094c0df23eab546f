"""DeviceMesh: ranks arranged along named axes, with a process group for each line of ranks along an axis."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hp_dtensor.mesh.axes import (
    AxisLayout,
    MeshValueError,
    OverlapError,
    axes_overlap,
    axis_layouts,
    check_world,
    find_axis,
    ranks_along,
    read_names,
    read_options,
    read_ranks,
    start,
    unflattened,
)
from hp_platform import get_platform
from hp_platform.extend import Level, level_of, load_port, own_rank, when_groups_end

_active = threading.local()
# By identity: equal meshes have groups of their own.
_living: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


class Ranks(Protocol):
    """The ranks of a mesh; ``<framework>/api.py``. Declared here, since ``hp_dtensor.port`` knows meshes."""

    def rank_tensor(self, ranks: np.ndarray) -> Any:
        """Make a tensor of ranks on the host."""
        ...


@functools.cache
def ranks_port() -> Ranks:
    """Return the framework's `Ranks`."""
    return load_port(Ranks, "api")


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
        self._options = read_options(backend_override, names, len(self.shape))
        self._rank: int | None = None
        self._coordinate: tuple[int, ...] | None = None
        if _init_groups:
            self._make_groups()
        self._locate()
        _living[id(self)] = self

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
        return ranks_port().rank_tensor(self.ranks)

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
        start()
        check_world(self.ranks)
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
        places = {rank: place for place, rank in enumerate(self._line(axis))}
        order = tuple(places[rank] for rank in get_platform().groups.ranks(self.get_group(axis)))
        return None if order == tuple(range(len(order))) else order

    def level(self, mesh_dim: int | str) -> Level:
        """Tell where the ranks along an axis are: what is sent along it stays on a host, or goes between hosts.

        The same on all ranks, and nothing is sent: ranks named their hosts when the default group was made. How many
        ranks a launcher started on a host plays no part.

        Example:
            >>> mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "tp"))   # on 2 hosts of 8 ranks
            >>> mesh.level("dp"), mesh.level("tp")
            ('between', 'host')

        Args:
            mesh_dim: the axis, by index or by name.

        Returns:
            "host" if each line of ranks along the axis is on one host, as a line of one rank is; "between" if on each
            line all ranks are on different hosts; else "mixed".

        Raises:
            RuntimeError: where ranks are isn't known: there is no default group, its store keeps nothing, or
                on MindSpore.
            ValueError: no such axis (IndexError of an index); KeyError of a name: see `axis`.
        """
        mesh, axis = self._find(mesh_dim)
        size = mesh.shape[axis]
        lines = np.moveaxis(mesh.ranks, axis, -1).reshape(-1, size).tolist()
        levels: set[Level] = set()
        for line in lines:
            level = level_of(line)
            if level is None:
                raise RuntimeError(
                    f"level: on which hosts the ranks of {mesh} are is not known. On PyTorch they say so in"
                    " hp_platform.init_process_group(); MindSpore's ranks don't."
                )
            levels.add(level)
        return levels.pop() if len(levels) == 1 else "mixed"

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
        return self._joined(requested, located)

    def _joined(self, names: Sequence[str], located: Sequence[tuple[DeviceMesh, int]]) -> DeviceMesh:
        """Return the mesh of these axes of sub-meshes of this mesh's root."""
        root, axes = self.root, tuple(each._axes[axis] for each, axis in located)
        if axes_overlap(axes):
            raise OverlapError(f"axes {tuple(names)} of {root} overlap: no rank may lie on two of them")
        coordinate = root.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {self.get_rank()} is not in {self}: it has no sub-mesh there")
        position = int(np.ravel_multi_index(coordinate, root.shape))
        submesh = self._derived(ranks_along(root.ranks, position, axes), names, axes)
        if all(each._groups is not None for each, _ in located):
            submesh._groups = tuple(each.get_group(axis) for each, axis in located)
        return submesh

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
        name = mesh_dim_name or "_".join(self.mesh_dim_names or ())
        if not name:
            raise RuntimeError("_flatten: give mesh_dim_name, this mesh has no mesh_dim_names to join")
        if self.mesh_dim_names == (name,):
            return self
        root, ranks = self.root, self.ranks.reshape(-1)
        if name in (root.mesh_dim_names or ()):
            raise ValueError(f"_flatten: {name!r} is already an axis of the root mesh {root.mesh_dim_names}")
        axis, flattened = tuple(term for each in self._axes for term in each), root._flattened.get(name)
        if flattened is not None and flattened._axes != (axis,):
            raise ValueError(
                f"_flatten: {name!r} is already the name of ranks {flattened.ranks.tolist()}, asked for"
                f" {ranks.tolist()}; choose another name"
            )
        if flattened is None:
            flattened = self._derived(ranks, (name,), (axis,), init_groups=self._groups is not None)
            root._flattened[name] = flattened
        return flattened

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
        axis, sizes = (self.axis(dim), dim), tuple(mesh_sizes)
        parts = unflattened(self._axes, self.ranks, self.mesh_dim_names, axis, sizes, mesh_dim_names)
        return self._derived(*parts, init_groups=self._groups is not None)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh of all axes of sub-meshes of one root, in that order.

        Raises:
            ValueError: no meshes, meshes of different roots or without names.
            KeyError: axes that share ranks.
        """
        meshes = list(device_mesh_list)
        if not meshes or any(mesh.root != meshes[0].root or mesh.mesh_dim_names is None for mesh in meshes):
            raise MeshValueError(f"_concatenate: pass sub-meshes with names of one root mesh; got {meshes}")
        located = [(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]
        names = read_names([name for mesh in meshes for name in mesh.mesh_dim_names or ()], (1,) * len(located))
        return meshes[0]._joined(names or (), located)

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
        result._adopt(groups)
        return result

    def _adopt(self, axis_groups: Sequence[Any]) -> None:
        """Take these groups, one per axis."""
        groups = get_platform().groups
        if self.ndim != len(axis_groups):
            raise ValueError(f"from_group: {len(axis_groups)} groups for a mesh of {self.ndim} axes")
        if self.get_coordinate() is None:
            raise ValueError(
                f"from_group: rank {self.get_rank()} is not in {self}; only members of the groups may call this"
            )
        for axis, group in enumerate(axis_groups):
            line, members = self._line(axis), groups.ranks(group)
            if sorted(line) != sorted(members):
                raise ValueError(f"from_group: axis {axis} has ranks {line}, but its group has {members}")
        groups.mark_created(axis_groups)
        self._groups = tuple(axis_groups)

    # ---- context ----
    def __enter__(self) -> DeviceMesh:
        if not hasattr(_active, "stack"):
            _active.stack = []
        _active.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _active.stack.pop()


def living() -> list[DeviceMesh]:
    """List the meshes that are in use."""
    return list(_living.values())


@when_groups_end
def _forget_groups() -> None:
    """Drop the groups of all meshes, which as values outlive them; the next use creates new ones."""
    for mesh in living():
        mesh._groups = mesh._rank = None


def _rebuild(kind: str, ranks: Any, names: Any, root: DeviceMesh | None = None, axes: Any = None) -> DeviceMesh:
    return DeviceMesh(kind, ranks, names, _init_groups=False, _root=root, _axes=axes)


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost active ``with mesh:``.

    Raises:
        RuntimeError: none is active.
    """
    stack = getattr(_active, "stack", None)
    if not stack:
        raise RuntimeError("no mesh is active: pass device_mesh, or call inside `with mesh:`")
    return stack[-1]
