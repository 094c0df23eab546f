"""TensorSpec: mesh, placements and global shape of one tensor, interned so that equal specs are one object."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from hp_dtensor.layout.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard, kind_of
from hp_dtensor.layout.sharding import local_shape
from hp_dtensor.layout.strides import is_thin
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
        thin: some rank has at most one index of a sharded dim; see Note [Thin shards] in `strides`.
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
