"""Axes of a mesh as values, and the sub-meshes that follow from them: slices, flattened and split axes.

Note [Axes are strided layouts]
    Number the positions of a root mesh in row-major order. An axis of a sub-mesh is then a layout of these numbers, as
    in CuTe: one or more terms (size, stride), the outer first. A slice keeps the terms of some axes, a flattened axis
    has the terms of several, and an unflattened axis is a term that was split. The ranks of every sub-mesh follow from
    the layouts of its axes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hp_dtensor.mesh.device_mesh import DeviceMesh


class MeshValueError(ValueError, RuntimeError):
    """Sizes, names or ranks that do not form a mesh."""


class NoAxisError(KeyError, ValueError):
    """A mesh has no axis of that name."""


class AxisRangeError(IndexError, ValueError):
    """A mesh has no axis of that index."""


class OverlapError(KeyError, RuntimeError):
    """Axes of a mesh share ranks."""


AxisLayout = tuple[tuple[int, int], ...]
"""The (size, stride) terms of one axis: Note [Axes are strided layouts]."""


def read_ranks(mesh: Any) -> np.ndarray:
    """Return the ranks of a (nested) list, array or tensor as a read-only array.

    Raises:
        TypeError: ranks that are not integers.
        ValueError: no ranks, or repeated ones.
    """
    array = np.array(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    if not array.size:
        raise ValueError(f"DeviceMesh: a mesh needs at least one rank, got {array.tolist()} of shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"DeviceMesh: ranks must be integers, got {array.tolist()} of {array.dtype}")
    ranks = array.astype(np.int64).reshape(array.shape or (1,))
    flat = ranks.reshape(-1).tolist()
    if len(set(flat)) != len(flat):
        repeated = sorted({rank for rank in flat if flat.count(rank) > 1})
        raise ValueError(f"DeviceMesh: ranks must be unique, {repeated} appear more than once in {ranks.tolist()}")
    ranks.setflags(write=False)
    return ranks


def read_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Check the names of axes.

    Raises:
        TypeError: a single string, or names that are not strings.
        ValueError: repeated names, or a different number of names than of axes.
    """
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"DeviceMesh: mesh_dim_names must be a sequence of strings, as ('dp', 'tp'), got {names!r}")
    checked = tuple(names)
    if len(checked) != len(shape):
        raise MeshValueError(
            f"DeviceMesh: {len(checked)} mesh_dim_names {checked} for a mesh of {len(shape)} axes {shape}"
        )
    if len(set(checked)) != len(checked):
        raise MeshValueError(f"DeviceMesh: mesh_dim_names must be unique, got {checked}")
    return checked


def find_axis(axis: Any, names: tuple[str, ...], shape: tuple[int, ...], others: Callable[[], Collection[str]]) -> int:
    """Return the index of an axis that is passed by index or by name.

    Args:
        axis: an index or a name.
        names: the names of the mesh's axes.
        shape: the mesh's shape.
        others: lists further valid names, for the error.

    Raises:
        NoAxisError: no axis of that name (near misses are listed); a KeyError and a ValueError.
        AxisRangeError: index out of range; an IndexError and a ValueError.
        TypeError: neither index nor name.
    """
    if isinstance(axis, str):
        if axis not in names:
            available = (*names, *others())
            near = difflib.get_close_matches(axis, available)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NoAxisError(f"no axis {axis!r} in a mesh with axes {available}{hint}")
        return names.index(axis)
    if not isinstance(axis, int):
        raise TypeError(f"an axis is named by a string or an index, got {axis!r}")
    if not -len(shape) <= axis < len(shape):
        raise AxisRangeError(f"axis {axis} of a mesh of {len(shape)} axes {shape}")
    return axis % len(shape)


def axis_layouts(shape: Sequence[int]) -> tuple[AxisLayout, ...]:
    """Return the axes of a root mesh of this shape."""
    return tuple(((size, prod(shape[axis + 1 :])),) for axis, size in enumerate(shape))


def axes_overlap(axes: Iterable[AxisLayout]) -> bool:
    """Tell whether two axes share a term, or were split from one term in incompatible ways."""
    terms = sorted((term for axis in axes for term in axis if term[0] > 1), key=lambda term: term[1])
    below = 1
    for size, stride in terms:
        if stride % below:
            return True
        below = size * stride
    return False


def axis_within(axis: AxisLayout, others: Iterable[AxisLayout]) -> bool:
    """Tell whether ``others`` cover all positions along an axis of more than one rank.

    Example:
        >>> axis_within(((4, 2),), [((2, 4),), ((2, 2),)])      # an axis of 4 that was unflattened
        True
    """
    terms = [term for each in others for term in each]
    for size, stride in axis:
        while size > 1:
            factor = next((n // (stride // s) for n, s in terms if s <= stride < n * s and stride % s == 0), 1)
            if factor == 1:
                return False
            size, stride = size // factor, stride * factor
    return True


def ranks_along(ranks: np.ndarray, position: int, axes: Sequence[AxisLayout]) -> np.ndarray:
    """Return the ranks along these axes through one position.

    Args:
        ranks: the ranks of the root mesh.
        position: a position in it, row by row.
        axes: axes that don't overlap.

    Returns:
        An array with one dim per axis.
    """
    positions = np.array([position - sum(position // stride % size * stride for axis in axes for size, stride in axis)])
    for size, stride in (term for axis in axes for term in axis):
        positions = (positions[:, None] + np.arange(size) * stride).reshape(-1)
    return ranks.reshape(-1)[positions].reshape([prod(size for size, _ in axis) for axis in axes])


def split_axis(axis: AxisLayout, sizes: Sequence[int]) -> list[AxisLayout] | None:
    """Split an axis into several, the outer first; return None if its terms cannot be split into these sizes."""
    rest, axes = list(axis), []
    for remaining in reversed(sizes):
        terms: list[tuple[int, int]] = []
        while remaining > 1:
            if not rest:
                return None
            size, stride = rest.pop()
            if remaining % size == 0:
                terms.insert(0, (size, stride))
                remaining //= size
            elif size % remaining == 0:
                terms.insert(0, (remaining, stride))
                rest.append((size // remaining, stride * remaining))
                remaining = 1
            else:
                return None
        axes.insert(0, tuple(terms) or ((1, 1),))
    return axes if all(size == 1 for size, _ in rest) else None


def check_member(mesh: DeviceMesh, what: str) -> None:
    """Refuse a rank that is not in the mesh.

    Args:
        mesh: the mesh.
        what: function that is called there, for the error.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{what}: rank {mesh.get_rank()} is not in {mesh}; call it on the ranks of the mesh alone, or"
            " make a mesh of all ranks"
        )


# ---- sub-meshes ----
def join(mesh: DeviceMesh, names: Sequence[str], located: Sequence[tuple[DeviceMesh, int]]) -> DeviceMesh:
    """Return the mesh of these axes of sub-meshes of ``mesh``'s root."""
    root, axes = mesh.root, tuple(each._axes[axis] for each, axis in located)
    if axes_overlap(axes):
        raise OverlapError(f"axes {tuple(names)} of {root} overlap: no rank may lie on two of them")
    coordinate = root.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank {mesh.get_rank()} is not in {mesh}: it has no sub-mesh there")
    position = int(np.ravel_multi_index(coordinate, root.shape))
    submesh = mesh._derived(ranks_along(root.ranks, position, axes), names, axes)
    if all(each._groups is not None for each, _ in located):
        submesh._groups = tuple(each.get_group(axis) for each, axis in located)
    return submesh


def flatten(mesh: DeviceMesh, mesh_dim_name: str | None) -> DeviceMesh:
    """Implement ``DeviceMesh._flatten``."""
    name = mesh_dim_name or "_".join(mesh.mesh_dim_names or ())
    if not name:
        raise RuntimeError("_flatten: give mesh_dim_name, this mesh has no mesh_dim_names to join")
    if mesh.mesh_dim_names == (name,):
        return mesh
    root, ranks = mesh.root, mesh.ranks.reshape(-1)
    if name in (root.mesh_dim_names or ()):
        raise ValueError(f"_flatten: {name!r} is already an axis of the root mesh {root.mesh_dim_names}")
    axis, flattened = tuple(term for each in mesh._axes for term in each), root._flattened.get(name)
    if flattened is not None and flattened._axes != (axis,):
        raise ValueError(
            f"_flatten: {name!r} is already the name of ranks {flattened.ranks.tolist()}, asked for {ranks.tolist()};"
            " choose another name"
        )
    if flattened is None:
        flattened = root._flattened[name] = mesh._derived(ranks, (name,), (axis,), init_groups=mesh._groups is not None)
    return flattened


def unflatten(
    mesh: DeviceMesh, dim: int | str, sizes: tuple[int, ...], mesh_dim_names: Sequence[str] | None
) -> DeviceMesh:
    """Implement ``DeviceMesh._unflatten``."""
    axis, names = mesh.axis(dim), None
    if (mesh_dim_names is None) != (mesh.mesh_dim_names is None):
        raise ValueError(f"_unflatten: mesh_dim_names {mesh_dim_names} for a mesh with names {mesh.mesh_dim_names}")
    if mesh.mesh_dim_names is not None and mesh_dim_names is not None:
        if len(mesh_dim_names) != len(sizes):
            raise MeshValueError(
                f"_unflatten: {len(mesh_dim_names)} mesh_dim_names for {len(sizes)} mesh_sizes {sizes}"
            )
        names = (*mesh.mesh_dim_names[:axis], *mesh_dim_names, *mesh.mesh_dim_names[axis + 1 :])
    split_axes = split_axis(mesh._axes[axis], sizes) if min(sizes, default=0) > 0 else None
    if split_axes is None:
        raise ValueError(
            f"_unflatten: sizes {sizes} do not fit axis {dim!r} of size {mesh.shape[axis]}: their product must be its"
            " size, and a flattened axis can only be split where its axes were joined"
        )
    ranks = mesh.ranks.reshape(*mesh.shape[:axis], *sizes, *mesh.shape[axis + 1 :])
    axes = (*mesh._axes[:axis], *split_axes, *mesh._axes[axis + 1 :])
    return mesh._derived(ranks, names, axes, init_groups=mesh._groups is not None)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Implement ``DeviceMesh._concatenate``."""
    if not meshes or any(mesh.root != meshes[0].root or mesh.mesh_dim_names is None for mesh in meshes):
        raise MeshValueError(f"_concatenate: pass sub-meshes with names of one root mesh; got {list(meshes)}")
    located = [(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]
    names = read_names([name for mesh in meshes for name in mesh.mesh_dim_names or ()], (1,) * len(located))
    return join(meshes[0], names or (), located)


def axes_within(mesh: DeviceMesh, outer: DeviceMesh) -> tuple[int, ...]:
    """Return the axes of ``mesh`` that lie on those of ``outer``; both are sub-meshes of one root.

    An axis of one rank lies on every mesh, so its name decides.

    Example:
        >>> axes_within(root, root["dp"])       # of a root ("dp", "tp")
        (0,)
    """
    return tuple(
        axis
        for axis, terms in enumerate(mesh._axes)
        if (
            axis_within(terms, outer._axes)
            if mesh.shape[axis] > 1
            else (mesh.mesh_dim_names or range(mesh.ndim))[axis] in (outer.mesh_dim_names or range(outer.ndim))
        )
    )
