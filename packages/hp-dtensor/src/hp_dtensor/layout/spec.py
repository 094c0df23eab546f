"""TensorSpec (mesh, placements and shape, interned), Layout (the same by tensor dim), and the specs of gradients.

Note [Gradient layouts]
On each mesh axis the placement of a value determines that of its gradient: Shard for Shard, Replicate for Partial, and
Replicate for Replicate, unless the result of the operation *varies* over the axis (it is Shard or Partial there). Then
each rank computes only its term of the gradient, which is Partial. So the backward of a redistribution is again a
redistribution, between the placements of the gradients, without a scale factor. These are the transpose rules of JAX's
``shard_map`` (``pvary``, ``psum``), applied to each operation.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard, kind_of
from hp_dtensor.layout.sharding import is_thin, local_shape
from hp_dtensor.mesh.device_mesh import DeviceMesh
from hp_platform.extend import when_groups_end


class TensorSpec:
    """The metadata of a distributed tensor. Create one with ``TensorSpec.of``.

    Attributes:
        mesh: the DeviceMesh.
        placements: one per axis.
        shape: the global shape.
        local_shape: the shape of this rank's local tensor.
        replicated: every placement is ``Replicate``.
        partial: some placement is ``Partial``.
        ragged: some placement is ``RaggedShard``.
        size: the global shape in the framework's own type, set at its first use.
        thin: some rank has at most one index of a sharded dim; see Note [Thin shards] in `sharding`.
        name: unique in this process; ``spec_named`` finds the spec by it.
    """

    __slots__ = (
        *("__weakref__", "local_shape", "mesh", "name", "partial", "placements", "replicated", "shape"),
        *("ragged", "size", "thin"),
    )

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    replicated: bool
    partial: bool
    ragged: bool
    size: Any
    thin: bool
    name: str

    @staticmethod
    def of(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> TensorSpec:
        """Return the one spec with this content."""
        key = (mesh, tuple(placements), tuple(shape))
        spec = _specs.get(key)
        if spec is None:
            spec = TensorSpec()
            spec.mesh, spec.placements, spec.shape = key
            coordinate = mesh.get_coordinate()
            if coordinate is None:
                spec.local_shape = (0,) * len(key[2])
            else:
                spec.local_shape = tuple(local_shape(key[2], key[1], mesh.shape, coordinate))
            spec.replicated = all(placement.is_replicate() for placement in key[1])
            spec.partial = any(placement.is_partial() for placement in key[1])
            spec.ragged = any(isinstance(placement, RaggedShard) for placement in key[1])
            spec.thin = is_thin(key[2], key[1], mesh.shape)
            spec.name = str(next(_numbers))
            _specs[key] = spec
        return spec

    def with_placements(self, placements: Sequence[Placement]) -> TensorSpec:
        """Return this spec with other placements."""
        return TensorSpec.of(self.mesh, placements, self.shape)

    def __repr__(self) -> str:
        return f"TensorSpec({self.mesh!r}, {self.placements}, {self.shape})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.mesh, self.placements, self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSpec:
        return self


def _rebuild(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> TensorSpec:
    return TensorSpec.of(mesh, placements, shape)


_specs: weakref.WeakValueDictionary[Any, TensorSpec] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@when_groups_end
def _forget_specs() -> None:
    """Drop specs whose local shape changed: under a new default group this rank may have another coordinate."""
    for key, spec in list(_specs.items()):
        coordinate = spec.mesh.get_coordinate()
        if coordinate is not None and spec.local_shape != tuple(
            local_shape(spec.shape, spec.placements, spec.mesh.shape, coordinate)
        ):
            _specs.pop(key, None)


def spec_named(name: str) -> TensorSpec:
    """Return the living spec of this name."""
    return next(spec for spec in list(_specs.values()) if spec.name == name)


def normalize(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int, what: str) -> tuple[Placement, ...]:
    """Check placements against a mesh and a number of tensor dims; negative dims count from the end.

    Args:
        placements: the user's argument.
        mesh: the mesh; it needs one placement per axis.
        ndim: number of tensor dims.
        what: the caller's name, for the error.

    Raises:
        TypeError: something that is not a placement.
        ValueError: a wrong number of placements, or a dim out of range.
    """
    if isinstance(placements, Placement):
        raise TypeError(
            f"{what}: placements must be a sequence with one placement per axis, got {placements!r}; write"
            f" [{placements!r}]"
        )
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{what}: {len(placements)} placements {placements} for a mesh of {mesh.ndim} axes"
            f" {mesh.mesh_dim_names or mesh.shape}"
        )
    normalized: list[Placement] = []
    for placement in placements:
        if isinstance(placement, (Shard, StridedShard)):
            if not -ndim <= placement.dim < ndim:
                raise ValueError(
                    f"{what}: {placement!r} of a tensor with {ndim} dims: the dim must be in [{-ndim}, {ndim - 1}]"
                )
            if placement.dim < 0:
                dim = placement.dim + ndim
                placement = Shard(dim) if isinstance(placement, Shard) else StridedShard(dim, placement.split_factor)
        elif not isinstance(placement, (Replicate, Partial, RaggedShard)):
            raise TypeError(
                f"{what}: {placement!r}, a {kind_of(placement)}, is not a placement of"
                " hp_dtensor (Shard, StridedShard, RaggedShard, Replicate, Partial)"
            )
        normalized.append(placement)
    return tuple(normalized)


def meshes() -> list[DeviceMesh]:
    """Return the meshes of all living specs."""
    return list(dict.fromkeys(spec.mesh for spec in list(_specs.values())))


class NoPlacementsError(ValueError, RuntimeError):
    """A redistribution without a target."""


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


@functools.lru_cache(maxsize=16384)
def grad_spec(spec: TensorSpec, vary: tuple[bool, ...] | None = None) -> TensorSpec:
    """Return the layout of a value's gradient; see Note [Gradient layouts]."""
    placements: list[Placement] = []
    for axis, placement in enumerate(spec.placements):
        if vary is not None and vary[axis] and placement.is_replicate():
            placements.append(Partial())
        else:
            placements.append(Replicate() if placement.is_partial() else placement)
    return spec.with_placements(placements)


def mark_summed_gradients(module: Any) -> None:
    """Note that the gradients of a module's parameters are sums over the losses of the ranks that share it.

    Args:
        module: of experts that are spread over ranks, whose tokens come from all of them.
    """
    module._sums_gradients_of_ranks = True


def sums_gradients(module: Any) -> bool:
    """Tell whether `mark_summed_gradients` was called with a module."""
    return getattr(module, "_sums_gradients_of_ranks", False)


@functools.lru_cache(maxsize=16384)
def backward_scale(src: TensorSpec, dst: TensorSpec) -> float:
    """Return the gradient scale of a redistribution: 1, except that each term of ``Partial("avg")`` gets 1/n."""
    scale = 1.0
    for axis, (a, b) in enumerate(zip(src.placements, dst.placements, strict=True)):
        ranks = src.mesh.shape[axis]
        if a.is_partial("avg") and not b.is_partial("avg"):
            scale /= ranks
        if b.is_partial("avg") and not a.is_partial("avg"):
            scale *= ranks
    return scale


def varying(spec: TensorSpec, grad_placements: Sequence[Placement]) -> tuple[bool, ...] | None:
    """By axis, whether a local part whose gradient has ``grad_placements`` varies; None where none does.

    Raises:
        ValueError: gradients of that layout can't come from a tensor of layout ``spec``.
    """
    placements = normalize(grad_placements, spec.mesh, len(spec.shape), "to_local: grad_placements")
    vary = tuple(p.is_replicate() and g.is_partial() for p, g in zip(spec.placements, placements, strict=True))
    for axis, (natural, grad) in enumerate(zip(grad_spec(spec).placements, placements, strict=True)):
        if natural != grad and not vary[axis]:
            raise ValueError(
                f"to_local: grad_placements[{axis}] is {grad!r} for a tensor placed {spec.placements[axis]!r}; "
                f"it may be {natural!r}" + (" or Partial()" if spec.placements[axis].is_replicate() else "")
            )
    return vary if any(vary) else None


def gather_as(parameter: Any, example: Any) -> None:
    """Let `hp_fsdp.fully_shard` gather a parameter as a tensor subclass says that has an all-gather extension.

    The parameter stays the object that it is: plain, or a DTensor, which no subclass can wrap. PyTorch only: see
    Note [Encoded parameters] in `hp_fsdp.torch.groups.encoding`.

    Args:
        parameter: plain, or a DTensor.
        example: an instance of the subclass around any tensor of the parameter's dtype, which is not read.
    """
    parameter._gathered_as = example


def gathered_as(parameter: Any) -> Any:
    """Return what `gather_as` was called with; the parameter itself where it was not."""
    return getattr(parameter, "_gathered_as", parameter)
