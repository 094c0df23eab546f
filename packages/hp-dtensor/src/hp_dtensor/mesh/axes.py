"""Axes of a mesh as values: the ranks of slices, of flattened and of split axes, and their process groups.

Note [Axes are strided layouts]
    Number the positions of a root mesh in row-major order. An axis of a sub-mesh is then a layout of these numbers, as
    in CuTe: one or more terms (size, stride), the outer first. A slice keeps the terms of some axes, a flattened axis
    has the terms of several, and an unflattened axis is a term that was split. The ranks of every sub-mesh follow from
    the layouts of its axes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from hp_platform import get_platform
from hp_platform.extend import inside_launcher, launch_command, launcher_place


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


def unflattened(
    axes: tuple[AxisLayout, ...],
    ranks: np.ndarray,
    names: tuple[str, ...] | None,
    axis: tuple[int, int | str],
    sizes: tuple[int, ...],
    new_names: Sequence[str] | None,
) -> tuple[np.ndarray, tuple[str, ...] | None, tuple[AxisLayout, ...]]:
    """Return the ranks, names and axes of a mesh one of whose axes is split into several.

    Args:
        axes: the mesh's.
        ranks: the mesh's.
        names: the mesh's.
        axis: the index of the axis, and what it was passed as.
        sizes: see ``DeviceMesh._unflatten``.
        new_names: likewise.

    Raises:
        ValueError: likewise.
    """
    index, passed = axis
    if (new_names is None) != (names is None):
        raise ValueError(f"_unflatten: mesh_dim_names {new_names} for a mesh with names {names}")
    if names is not None and new_names is not None:
        if len(new_names) != len(sizes):
            raise MeshValueError(f"_unflatten: {len(new_names)} mesh_dim_names for {len(sizes)} mesh_sizes {sizes}")
        names = (*names[:index], *new_names, *names[index + 1 :])
    split_axes = split_axis(axes[index], sizes) if min(sizes, default=0) > 0 else None
    if split_axes is None:
        raise ValueError(
            f"_unflatten: sizes {sizes} do not fit axis {passed!r} of size {ranks.shape[index]}: their product must be"
            " its size, and a flattened axis can only be split where its axes were joined"
        )
    ranks = ranks.reshape(*ranks.shape[:index], *sizes, *ranks.shape[index + 1 :])
    return ranks, names, (*axes[:index], *split_axes, *axes[index + 1 :])


def start() -> None:
    """Use the device that the launcher assigned, unless the process uses one already, and create the default group."""
    platform, place = get_platform(), launcher_place()
    if place is not None and platform.devices.kind != "cpu":
        used = getattr(platform.devices.device_module(), "is_initialized", None)
        if used is not None and not used():
            platform.devices.set_device(place.local_rank)
    if not platform.groups.is_initialized():
        platform.groups.init_process_group()


def check_world(ranks: np.ndarray) -> None:
    """Raise ValueError if a mesh names ranks outside the world."""
    world = get_platform().groups.size()
    outside = [rank for rank in ranks.reshape(-1).tolist() if not 0 <= rank < world]
    if outside:
        raise MeshValueError(
            f"DeviceMesh: ranks {outside} of {ranks.tolist()} are not in the world of {world} ranks"
            f"{advice_for(max(outside) + 1)}"
        )


def advice_for(ranks: int) -> str:
    """Return what to do where a process that no launcher has started needs so many ranks; empty elsewhere."""
    platform = get_platform()
    if platform.groups.size() > 1 or inside_launcher():
        return ""
    return f"; no launcher started this process: start it with {launch_command(platform.name, ranks)}"


def read_options(override: Any, names: Sequence[str] | None, ndim: int) -> dict[int, Any]:
    """Return the group options of each axis that ``backend_override`` has some for.

    Args:
        override: see ``DeviceMesh``.
        names: the names of the axes.
        ndim: the number of axes.

    Raises:
        ValueError: an unknown or repeated axis, or a different number of values than of axes (each also a
            RuntimeError); or a backend other than the default group's.
    """
    if override is None:
        return {}
    if not isinstance(override, Mapping):
        if isinstance(override, str) or len(override) != ndim:
            raise MeshValueError(
                f"DeviceMesh: backend_override needs one value for each of {ndim} axes, got {override!r}"
            )
        override = dict(enumerate(override))
    options: dict[int, Any] = {}
    for key, value in override.items():
        axis = names.index(key) if names and key in names else key
        if not isinstance(axis, int) or not 0 <= axis < ndim or axis in options:
            expected = f"indices from 0 to {ndim - 1}" + (f" or names of {tuple(names)}" if names else "")
            raise MeshValueError(f"DeviceMesh: backend_override needs {expected}, each axis once, got {list(override)}")
        backend, chosen = (
            value if isinstance(value, tuple) else (value, None) if isinstance(value, str) else (None, value)
        )
        if backend is not None:
            _check_backend(key, str(backend))
        options[axis] = chosen
    return options


def _check_backend(key: Any, backend: str) -> None:
    start()
    default = get_platform().groups.backend()
    if backend.lower() != default:
        raise ValueError(
            f"DeviceMesh: backend_override has {backend!r} for axis {key!r}, but the groups of a mesh use the default"
            f" group's backend, {default!r}: leave it out, or start the ranks with init_process_group({backend!r})"
        )
