"""DeviceMesh: ranks arranged in n named axes, a process group for each line along an axis."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_platform import get_platform

__all__ = ["DeviceMesh", "get_current_mesh", "init_device_mesh"]

_active = threading.local()


class DeviceMesh:
    """An n-d arrangement of ranks.

    Meshes are values: equal and of equal hash when device type, ranks, shape and axis names are equal. A group is made
    for each axis when the mesh is made (unless ``_init_groups=False``); groups are cached by rank set, so two meshes
    over the same ranks share communicators.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))   # on 4 ranks
        >>> mesh["tp"].size()
        2

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh: global ranks as a (nested) list or array; its shape is the mesh's shape. Ranks must be unique.
        mesh_dim_names: one name an axis, unique; also accepted by keyword.

    Raises:
        ValueError: repeated ranks, ranks that the world has not, ranks that descend along an axis, repeated names, or a
            number of names that is not the number of axes.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        _init_groups: bool = True,
        _root: DeviceMesh | None = None,
    ) -> None:
        ranks = np.array(mesh.tolist() if hasattr(mesh, "tolist") else mesh, dtype=np.int64)
        if ranks.ndim == 0:
            ranks = ranks.reshape(1)
        flat = tuple(int(rank) for rank in ranks.reshape(-1))
        if len(set(flat)) != len(flat):
            repeated = sorted({rank for rank in flat if flat.count(rank) > 1})
            raise ValueError(f"DeviceMesh: ranks must be unique, {repeated} appear more than once in {ranks.tolist()}")
        names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
        if names is not None:
            if len(names) != ranks.ndim:
                raise ValueError(
                    f"DeviceMesh: {len(names)} mesh_dim_names {names} for a mesh of {ranks.ndim} axes {ranks.shape}"
                )
            if len(set(names)) != len(names):
                raise ValueError(f"DeviceMesh: mesh_dim_names must be unique, got {names}")
        self.device_type = device_type
        self.mesh = ranks
        self.shape: tuple[int, ...] = tuple(ranks.shape)
        self.mesh_dim_names = names
        self.root: DeviceMesh = _root if _root is not None else self
        self._flattened: dict[str, DeviceMesh] = {}
        self._key = (device_type, self.shape, flat, names)
        self._hash = hash(self._key)
        self._groups: tuple[Any, ...] | None = None
        groups = get_platform().groups
        self._rank = groups.rank() if groups.is_initialized() else 0
        position = np.argwhere(ranks == self._rank)
        self._coordinate: tuple[int, ...] | None = tuple(int(i) for i in position[0]) if len(position) else None
        if _init_groups:
            self._make_groups()

    # ---- values ----
    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, DeviceMesh) and self._hash == other._hash and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}{names})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.device_type, self.mesh.tolist(), self.mesh_dim_names)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ---- shape and place ----
    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks, of the whole mesh or along one axis."""
        return int(self.mesh.size) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def get_device_num_along_axis(self, name: str) -> int:
        """Number of ranks along the axis called ``name``."""
        return self.size(name)

    def axis(self, mesh_dim: int | str) -> int:
        """The index of an axis, given by index or by name.

        Raises:
            KeyError: no axis of that name (near misses are listed).
            IndexError: index out of range.
        """
        if isinstance(mesh_dim, str):
            names = self.mesh_dim_names or ()
            if mesh_dim not in names:
                near = difflib.get_close_matches(mesh_dim, names)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise KeyError(f"no axis {mesh_dim!r} in a mesh with axes {names}{hint}")
            return names.index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise IndexError(f"axis {mesh_dim} of a mesh of {self.ndim} axes {self.shape}")
        return mesh_dim % self.ndim

    def get_rank(self) -> int:
        """This process's global rank."""
        return self._rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's index on each axis; None where the rank is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's index along an axis (which may be left out on a mesh of one axis).

        Raises:
            RuntimeError: ``mesh_dim=None`` on a mesh of several axes, or this rank is not in the mesh.
        """
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(
                    f"get_local_rank: name the axis, the mesh has {self.ndim}: {self.mesh_dim_names or self.shape}"
                )
            mesh_dim = 0
        if self._coordinate is None:
            raise RuntimeError(f"rank {self._rank} is not in {self}")
        return self._coordinate[self.axis(mesh_dim)]

    # ---- groups ----
    def _make_groups(self) -> None:
        groups = get_platform().groups
        world = groups.size()
        outside = [rank for rank in self._key[2] if not 0 <= rank < world]
        if outside:
            raise ValueError(
                f"DeviceMesh: ranks {outside} of {self.mesh.tolist()} are not in the world of {world} ranks"
            )
        if self._coordinate is None:
            self._groups = ()
            return
        made = []
        for axis in range(self.ndim):
            index: list[Any] = list(self._coordinate)
            index[axis] = slice(None)
            line = [int(rank) for rank in self.mesh[tuple(index)]]
            if line != sorted(line):
                raise ValueError(
                    f"DeviceMesh: ranks must ascend along each axis, axis {axis} has {line} in {self.mesh.tolist()}"
                )
            made.append(groups.new_group(line))
        self._groups = tuple(made)

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The process group of this rank's line along an axis (which may be left out on a mesh of one axis).

        Raises:
            RuntimeError: ``mesh_dim=None`` on a mesh of several axes, or this rank is not in the mesh.
        """
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(
                    f"get_group: name the axis, the mesh has {self.ndim}: {self.mesh_dim_names or self.shape}"
                )
            mesh_dim = 0
        if self._groups is None:
            self._make_groups()
        if not self._groups:
            raise RuntimeError(f"rank {self._rank} is not in {self}: it has no group there")
        return self._groups[self.axis(mesh_dim)]

    def get_all_groups(self) -> list[Any]:
        """The groups of all axes, in their order."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    # ---- sub-meshes ----
    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of the named axes that holds this rank, axes in the order given.

        Raises:
            KeyError: unknown or repeated names, or a mesh without names.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if self.mesh_dim_names is None:
            raise KeyError(f"cannot slice by name {wanted}: this mesh has no mesh_dim_names")
        if wanted == self.mesh_dim_names:
            return self
        if len(wanted) == 1 and wanted[0] in self.root._flattened:
            return self.root._flattened[wanted[0]]
        if len(set(wanted)) != len(wanted):
            raise KeyError(f"axis names must not repeat, got {wanted}")
        axes = [self.axis(name) for name in wanted]
        if self._coordinate is None:
            raise RuntimeError(f"rank {self._rank} is not in {self}: it has no sub-mesh there")
        index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(self._coordinate))
        kept = sorted(axes)
        ranks = np.transpose(self.mesh[index], [kept.index(axis) for axis in axes])
        sub = DeviceMesh(self.device_type, ranks, wanted, _init_groups=False, _root=self.root)
        if self._groups is not None:
            sub._groups = tuple(self.get_group(axis) for axis in axes)
        return sub

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """The same ranks on one axis, also reachable as ``root[mesh_dim_name]`` afterwards.

        Args:
            mesh_dim_name: the new axis's name; default the names joined by ``_``.

        Raises:
            ValueError: the name is an axis of the root mesh, or that of other ranks.
            RuntimeError: no name, and no axis names to join.
        """
        if mesh_dim_name is None:
            if self.mesh_dim_names is None:
                raise RuntimeError("_flatten: give mesh_dim_name, this mesh has no mesh_dim_names to join")
            mesh_dim_name = "_".join(self.mesh_dim_names)
        if self.root.mesh_dim_names and mesh_dim_name in self.root.mesh_dim_names and self.ndim > 1:
            raise ValueError(
                f"_flatten: {mesh_dim_name!r} is already an axis of the root mesh {self.root.mesh_dim_names}"
            )
        known = self.root._flattened.get(mesh_dim_name)
        if known is not None:
            if known.mesh.tolist() == self.mesh.reshape(-1).tolist():
                return known
            raise ValueError(
                f"_flatten: {mesh_dim_name!r} is already the name of ranks {known.mesh.tolist()}, "
                f"asked for {self.mesh.reshape(-1).tolist()}; choose another name"
            )
        flat = DeviceMesh(self.device_type, self.mesh.reshape(-1), (mesh_dim_name,), _root=self.root)
        self.root._flattened[mesh_dim_name] = flat
        return flat

    @staticmethod
    def from_group(
        group: Any, device_type: str, mesh: Any = None, *, mesh_dim_names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """A mesh over existing process groups: one group, or a list with a group for each axis of ``mesh``.

        Raises:
            ValueError: a list of several groups without ``mesh``, or a mesh whose line is not its group's ranks.
        """
        groups = get_platform().groups
        given = list(group) if isinstance(group, (list, tuple)) else [group]
        if len(given) == 1 and mesh is None:
            mesh = groups.ranks(given[0])
        if mesh is None:
            raise ValueError(f"from_group: {len(given)} groups need mesh=, the ranks in {len(given)} axes")
        made = DeviceMesh(device_type, mesh, mesh_dim_names, _init_groups=False)
        if made.ndim != len(given):
            raise ValueError(f"from_group: {len(given)} groups for a mesh of {made.ndim} axes")
        for axis, one in enumerate(given):
            index: list[Any] = list(made._coordinate or ())
            if index:
                index[axis] = slice(None)
                line, have = made.mesh[tuple(index)].tolist(), groups.ranks(one)
                if sorted(line) != sorted(have):
                    raise ValueError(f"from_group: axis {axis} holds ranks {line}, its group holds {have}")
        groups.mark_created(given)
        made._groups = tuple(given)
        return made

    # ---- context ----
    def __enter__(self) -> DeviceMesh:
        if not hasattr(_active, "stack"):
            _active.stack = []
        _active.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _active.stack.pop()


def _rebuild(device_type: str, ranks: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(device_type, ranks, names, _init_groups=False)


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh over all ranks in order: rank ``r`` sits at ``numpy.unravel_index(r, mesh_shape)``.

    Initialises the default process group where there is none.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        mesh_shape: size of each axis; the product is the world size.
        mesh_dim_names: one name an axis.

    Raises:
        ValueError: the product of ``mesh_shape`` is not the world size, or ``device_type`` has an index.
    """
    if ":" in device_type:
        kind = device_type.partition(":")[0]
        raise ValueError(
            f"init_device_mesh: device_type {device_type!r} names one device; give the kind, {kind!r}: "
            "each rank uses the current device of that kind"
        )
    groups = get_platform().groups
    if not groups.is_initialized():
        groups.init_process_group()
    shape = tuple(int(size) for size in ((mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape))
    world = groups.size()
    need = int(np.prod(shape)) if shape else 1
    if need != world:
        raise ValueError(
            f"init_device_mesh: mesh_shape {shape} has {need} places, the world has {world} ranks; "
            f"start {need} ranks or change the shape"
        )
    return DeviceMesh(device_type, np.arange(need).reshape(shape), mesh_dim_names)


def get_current_mesh() -> DeviceMesh:
    """The innermost active ``with mesh:``.

    Raises:
        RuntimeError: none is active.
    """
    stack = getattr(_active, "stack", None)
    if not stack:
        raise RuntimeError("no mesh is active: pass device_mesh, or call inside `with mesh:`")
    return stack[-1]
