"""DataAxes: the mesh axes over which a group is sharded and replicated, of a larger mesh or of all ranks."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hp_dtensor import DeviceMesh, Placement, RaggedShard, Replicate, Shard, init_device_mesh
from hp_dtensor.extend import TensorSpec, axes_overlap, axes_within, check_member, slice_of
from hp_platform import get_platform
from hp_platform.extend import when_groups_end


class _Reinitializable:
    """Holds process groups, and makes them again after they were destroyed.

    Destroyed groups are deleted attributes, so `__getattr__` finds them; live ones are read at no cost.
    """

    __slots__ = ("__weakref__",)
    _group_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _living.add(self)

    def __getattr__(self, name: str) -> Any:
        if name not in self._group_names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._find_groups()
        return object.__getattribute__(self, name)

    def _find_groups(self) -> None:
        raise NotImplementedError


_living: weakref.WeakSet[_Reinitializable] = weakref.WeakSet()


@when_groups_end
def _forget_groups() -> None:
    for each in list(_living):
        for name in each._group_names:
            with contextlib.suppress(AttributeError):
                delattr(each, name)


@dataclass(eq=False, slots=True)
class PostForwardRanks(_Reinitializable):
    """A smaller group of consecutive ranks of the shard axis.

    Attributes:
        axes: the axes of data parallelism.
        size: number of its ranks.
        place: this rank's index in it.
        group: its process group.
    """

    _group_names = ("group",)
    axes: DataAxes
    size: int
    place: int
    group: Any = None

    def _find_groups(self) -> None:
        groups = get_platform().groups
        first = self.axes.shard_rank - self.place
        line = groups.get_process_group_ranks(self.axes.shard_group)
        self.group = groups.new_group(line[first : first + self.size])


@dataclass(eq=False, slots=True)
class ReduceScatterGroup(_Reinitializable):
    """A second process group of the ranks of a shard axis, one for each set of ranks.

    Attributes:
        ranks: of the group.
        group: the group.
    """

    _group_names = ("group",)
    ranks: tuple[int, ...]
    group: Any = None

    @staticmethod
    def of(axes: DataAxes) -> ReduceScatterGroup:
        """Return the group of these axes, made at the first call, which all ranks of the axis must make."""
        ranks = tuple(get_platform().groups.get_process_group_ranks(axes.shard_group))
        separate = _separate.get(ranks)
        if separate is None:
            separate = _separate[ranks] = ReduceScatterGroup(ranks)
            separate._find_groups()
        return separate

    def _find_groups(self) -> None:
        self.group = get_platform().groups.second_group(self.ranks)


_separate: dict[tuple[int, ...], ReduceScatterGroup] = {}


@dataclass(eq=False, slots=True)
class DataAxes(_Reinitializable):
    """The one or two axes of data parallelism: parameters are sharded over the last, replicated over the first of two.

    Attributes:
        mesh: a mesh of one axis (shard) or two (replicate, shard).
        shard_group: process group of this rank's line along the shard axis.
        shard_size: number of ranks on it.
        shard_rank: this rank's index on it.
        replicate_group: process group along the replicate axis; None if there is none, or only one rank on it.
        replicate_size: number of ranks on it; 1 if there is none.
        shards: False if parameters are replicated over all axes of ``mesh``; the shard axis is then one rank's.
    """

    _group_names = ("shard_group", "replicate_group")
    mesh: DeviceMesh
    shard_group: Any
    shard_size: int
    shard_rank: int
    replicate_group: Any
    replicate_size: int
    shards: bool = True

    def _find_groups(self) -> None:
        if not self.shards:
            ranks = sorted(self.mesh.ranks.reshape(-1).tolist())
            groups = get_platform().groups
            self.shard_group, self.replicate_group = None, groups.new_group(ranks) if len(ranks) > 1 else None
            return
        shard = self.mesh.ndim - 1
        place = self.mesh.get_local_rank(shard)
        if place != self.shard_rank:
            raise RuntimeError(
                f"fully_shard: this process had index {self.shard_rank} on the shard axis of {self.mesh} and has index"
                f" {place} since the process groups were recreated, so it holds the wrong shards. Build and"
                " shard the model again"
            )
        self.shard_group = self.mesh.get_group(shard)
        self.replicate_group = self.mesh.get_group(0) if self.replicate_size > 1 else None

    @staticmethod
    def of(mesh: DeviceMesh) -> DataAxes:
        """Return the axes of ``mesh``.

        Raises:
            ValueError: a mesh of more than two axes, one that does not hold this rank, or one whose ranks do not ascend
                along the shard axis: pieces are gathered in the group's order.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard: the mesh must have one axis (shard) or two (replicate, shard), got {mesh.ndim}: "
                f"{mesh.mesh_dim_names or mesh.shape}. Slice the axes of data parallelism from it, such as "
                'mesh["dp_replicate", "dp_shard"]'
            )
        check_member(mesh, "fully_shard")
        shard = mesh.ndim - 1
        if mesh.group_order(shard) is not None:
            raise ValueError(
                f"fully_shard: ranks must ascend along the shard axis, axis {shard} of {mesh} has another order; make"
                " the mesh of data parallelism with ranks in order"
            )
        replicas = mesh.size(0) if mesh.ndim == 2 else 1
        return DataAxes(
            mesh=mesh,
            shard_group=mesh.get_group(shard),
            shard_size=mesh.size(shard),
            shard_rank=mesh.get_local_rank(shard),
            replicate_group=mesh.get_group(0) if replicas > 1 else None,
            replicate_size=replicas,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks of data parallelism."""
        return self.shard_size * self.replicate_size

    @property
    def row(self) -> int:
        """Number, among all ranks of data parallelism, of the first rank of this rank's line along the shard axis."""
        return self.mesh.get_local_rank(0) * self.shard_size if self.mesh.ndim == 2 else 0

    def post_forward_ranks(self, size: bool | int) -> PostForwardRanks | None:
        """Return the smaller group of consecutive ranks, with this one, that keeps shards between forward and backward.

        Args:
            size: number of its ranks; a bool, 1 and the size of the shard axis ask for none.

        Returns:
            The group; None without a smaller one.

        Raises:
            ValueError: ``size`` does not divide the shard axis.
        """
        if isinstance(size, bool) or size in (1, self.shard_size):
            return None
        if size < 1 or self.shard_size % size:
            raise ValueError(
                f"fully_shard: reshard_after_forward={size} must divide the {self.shard_size} ranks of the shard axis:"
                f" {[n for n in range(1, self.shard_size + 1) if self.shard_size % n == 0]} do"
            )
        ranks = PostForwardRanks(self, size, self.shard_rank % size)
        ranks._find_groups()
        return ranks

    def replicated(self) -> DataAxes:
        """Return the same ranks, all of them replicas, for parameters that are not sharded."""
        axes = DataAxes(self.mesh, None, 1, 0, None, self.mesh.size(), shards=False)
        axes._find_groups()
        return axes

    def axes_of(self, inner: DeviceMesh) -> tuple[int, ...]:
        """Return the axes of a parameter's own mesh that are axes of data parallelism."""
        if inner == self.mesh:
            return tuple(range(inner.ndim))
        inner_slice = slice_of(self.mesh.root, inner)
        return () if inner_slice is None else axes_within(inner_slice, self.mesh)

    def divided(self, name: str, inner: TensorSpec | None) -> bool:
        """Tell whether a parameter's own layout shards it over axes of data parallelism, so that no group has to.

        Args:
            name: the parameter's, for errors.
            inner: its own layout, if it has one.

        Raises:
            ValueError: it does so over some of these axes, and its mesh lacks the others: nobody would reduce its
                gradients there.
        """
        if inner is None:
            return False
        axes = self.axes_of(inner.mesh)
        here = [inner.placements[axis] for axis in axes]
        if all(p.is_replicate() for p in here) or any(isinstance(p, RaggedShard) for p in here):
            return False
        ranks = math.prod(inner.mesh.size(axis) for axis in axes)
        if ranks != self.mesh.size():
            raise ValueError(
                f"fully_shard: parameter {name!r} is placed {inner.placements} on {inner.mesh}, which is a part of the"
                f" mesh of data parallelism, {self.mesh}: its layout divides it over {ranks} of {self.mesh.size()}"
                " ranks, and over the others nobody would reduce its gradients. Pass the other axes alone, such as"
                ' mesh["dp"] of ("dp", "tp"), or lay it out on the full mesh'
            )
        return True

    def layout_ranks(self, root: DataAxes, parameters: Sequence[tuple[str, TensorSpec | None]]) -> int:
        """Count the ranks of the root's data parallelism over which parameters of this group are divided already.

        Experts, spread over some of the ranks that have different samples, and sharded by a group of their own over the
        others: each gets the gradients of all samples, and the mean is that over all of the root's ranks.

        Args:
            root: the axes of the outermost group.
            parameters: names and own layouts of this group's.

        Returns:
            1 where this group is on the root's ranks itself.

        Raises:
            ValueError: a parameter has no layout that divides it over the root's other ranks, where nobody would reduce
                its gradients.
        """
        if self.mesh == root.mesh:  # most groups
            return 1
        ours, all_ranks = _ranks(self.mesh), _ranks(root.mesh)
        if not ours < all_ranks:
            return 1
        groups = get_platform().groups
        for name, inner in parameters:
            covered = len(ours)
            for axis, placement in enumerate(inner.placements if inner is not None else ()):
                assert inner is not None
                line = set(groups.get_process_group_ranks(inner.mesh.get_group(axis)))
                if len(line & ours) == 1 and not (placement.is_replicate() or placement.is_partial()):
                    # Its ranks outside of the root's have the samples of those inside: tensor parallel ones.
                    covered *= len(line & all_ranks)
            if covered != len(all_ranks):
                layout = "no layout of its own" if inner is None else f"{inner.placements} on {inner.mesh}"
                raise ValueError(
                    f"fully_shard: the group of parameter {name!r} is on {self.mesh}, {len(ours)} of the"
                    f" {len(all_ranks)} ranks of the outermost group, {root.mesh}, and its own layout ({layout}) does"
                    " not divide it over the others: nobody would reduce its gradients there. Pass the outermost"
                    " group's mesh, or spread the parameter over the other ranks first, as experts are"
                )
        return len(all_ranks) // len(ours)

    def sharded_spec(
        self, name: str, units: Sequence[int], shape: Sequence[int], inner: TensorSpec | None, dim: int | None = None
    ) -> TensorSpec:
        """Return the layout of a sharded parameter.

        Args:
            name: the parameter's name, for errors.
            units: number of elements on each rank of the shard axis.
            shape: the parameter's global shape.
            inner: its own layout, if it is a DTensor already: on other axes (tensor parallel), or on a mesh that
                includes these axes.
            dim: the sharded dim; None for ranges of flattened elements.

        Raises:
            ValueError: ``inner`` is on a mesh that cannot be joined with this one, shards ``dim``, or is uneven.
        """
        ours: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.shards:
            ours[-1] = RaggedShard(tuple(range(len(shape))), tuple(units)) if dim is None else Shard(dim)
        if inner is None:
            return TensorSpec.of(self.mesh, ours, shape)
        here = self.axes_of(inner.mesh)
        if any(not inner.placements[axis].is_replicate() for axis in here):
            raise ValueError(
                f"fully_shard: parameter {name!r} is placed {inner.placements} on {inner.mesh}, as a copy of one that"
                " is sharded. Copy a model before fully_shard, or build a second one and load its state"
            )
        if dim is None and self.shards and any(isinstance(p, RaggedShard) for p in inner.placements):
            raise ValueError(
                f"fully_shard: parameter {name!r} is spread unevenly over {inner.mesh}, {inner.placements}, and cannot"
                " be cut into ranges of its elements as well: shard another dim, with"
                " shard_placement_fn=lambda parameter: Shard(1), or use a number of ranks that divides it"
            )
        others = [axis for axis in range(inner.mesh.ndim) if axis not in here]
        if not others:
            return TensorSpec.of(self.mesh, ours, shape)
        if dim is not None and any(_divides(inner.placements[axis], dim) for axis in others):
            raise ValueError(
                f"fully_shard: shard_placement_fn returned Shard({dim}) for {name!r}, which is placed"
                f" {inner.placements} on {inner.mesh} and so divided along that dim already. Return a Shard of another"
                " dim, or None to shard it at any element"
            )
        mesh = self._joined(name, inner.mesh, others)
        return TensorSpec.of(mesh, [*ours, *(inner.placements[axis] for axis in others)], shape)

    def _joined(self, name: str, inner: DeviceMesh, others: Sequence[int]) -> DeviceMesh:
        inner_slice = slice_of(self.mesh.root, inner)
        ours, theirs = self.mesh.mesh_dim_names, inner.mesh_dim_names
        if inner_slice is not None and ours is not None and theirs is not None:
            names = tuple(theirs[axis] for axis in others)
            if not set(ours) & set(names) and not axes_overlap(
                (*self.mesh._axes, *(inner_slice._axes[axis] for axis in others))
            ):
                both = (*ours, *names)
                root_names = self.mesh.root.mesh_dim_names or ()
                return (
                    self.mesh.root[both]
                    if set(both) <= set(root_names)
                    else DeviceMesh._concatenate([self.mesh, inner_slice[names]])
                )
        raise ValueError(
            f"fully_shard: parameter {name!r} is a DTensor on {inner}, the group is to be sharded on {self.mesh}."
            " Both must be slices of one mesh, by name: mesh = init_device_mesh(..., mesh_dim_names=("
            '"dp", "tp")); parallelize on mesh["tp"] or on the full mesh, shard on mesh["dp"]'
        )


def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.ranks.flatten().tolist())


def _divides(placement: Placement, dim: int) -> bool:
    return dim in getattr(placement, "dims", (getattr(placement, "dim", None),))


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
