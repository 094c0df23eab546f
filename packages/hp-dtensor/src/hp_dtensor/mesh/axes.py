"""Ranks and axes of a mesh as values: read, checked, cut.

Note [Axes are digits]
    The places of a root mesh are numbered row by row, and an axis is a digit of that number: ``size`` values,
    ``stride`` places apart. A slice keeps some digits, a flattened axis is several digits, the outer first, an
    unflattened one is a digit that was split. So every mesh that was cut from a root says which digits its axes are,
    and the ranks follow.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from hp_dtensor.errors import AxisRangeError, MeshValueError, NoAxisError

__all__ = ["Digits", "cut", "digits_of", "find_axis", "overlap", "read_names", "read_ranks", "split", "within"]

Digits = tuple[tuple[int, int], ...]
"""The (size, stride) of each digit of one axis: Note [Axes are digits]."""


def read_ranks(mesh: Any) -> np.ndarray:
    """Return the ranks of a (nested) list, array or tensor as a read-only array.

    Raises:
        TypeError: something that is no integer.
        ValueError: no rank at all, or one more than once.
    """
    given = np.array(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    if not given.size:
        raise ValueError(f"DeviceMesh: a mesh needs at least one rank, got {given.tolist()} of shape {given.shape}")
    if given.dtype.kind not in "iu":
        raise TypeError(f"DeviceMesh: ranks must be integers, got {given.tolist()} of {given.dtype}")
    ranks = given.astype(np.int64).reshape(given.shape or (1,))
    flat = ranks.reshape(-1).tolist()
    if len(set(flat)) != len(flat):
        repeated = sorted({rank for rank in flat if flat.count(rank) > 1})
        raise ValueError(f"DeviceMesh: ranks must be unique, {repeated} appear more than once in {ranks.tolist()}")
    ranks.setflags(write=False)
    return ranks


def read_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Check the names of axes.

    Raises:
        TypeError: a single string, or something else than strings.
        ValueError: repeated names, or a number of names that is not the number of axes.
    """
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"DeviceMesh: mesh_dim_names must be a sequence of strings, as ('dp', 'tp'), got {names!r}")
    found = tuple(names)
    if len(found) != len(shape):
        raise MeshValueError(f"DeviceMesh: {len(found)} mesh_dim_names {found} for a mesh of {len(shape)} axes {shape}")
    if len(set(found)) != len(found):
        raise MeshValueError(f"DeviceMesh: mesh_dim_names must be unique, got {found}")
    return found


def find_axis(axis: Any, names: tuple[str, ...], shape: tuple[int, ...], others: Callable[[], Collection[str]]) -> int:
    """Return the index of an axis that is passed by index or by name.

    Args:
        axis: what was given.
        names: of the mesh's axes.
        shape: of the mesh.
        others: lists further names that are known, for the error.

    Raises:
        NoAxisError: no axis of that name (near misses are listed); a KeyError and a ValueError.
        AxisRangeError: index out of range; an IndexError and a ValueError.
        TypeError: neither index nor name.
    """
    if isinstance(axis, str):
        if axis not in names:
            known = (*names, *others())
            near = difflib.get_close_matches(axis, known)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NoAxisError(f"no axis {axis!r} in a mesh with axes {known}{hint}")
        return names.index(axis)
    if not isinstance(axis, int):
        raise TypeError(f"an axis is named by a string or an index, got {axis!r}")
    if not -len(shape) <= axis < len(shape):
        raise AxisRangeError(f"axis {axis} of a mesh of {len(shape)} axes {shape}")
    return axis % len(shape)


def digits_of(shape: Sequence[int]) -> tuple[Digits, ...]:
    """Return the axes of a root mesh of this shape."""
    return tuple(((size, prod(shape[axis + 1 :])),) for axis, size in enumerate(shape))


def overlap(axes: Iterable[Digits]) -> bool:
    """Whether two axes share a digit, or were split from one digit in ways that don't fit each other."""
    digits = sorted((digit for axis in axes for digit in axis if digit[0] > 1), key=lambda digit: digit[1])
    below = 1
    for size, stride in digits:
        if stride % below:
            return True
        below = size * stride
    return False


def within(axis: Digits, others: Iterable[Digits]) -> bool:
    """Whether ``others`` hold all places of an axis of more than one.

    Example:
        >>> within(((4, 2),), [((2, 4),), ((2, 2),)])      # an axis of 4 that was unflattened
        True
    """
    digits = [digit for each in others for digit in each]
    for size, stride in axis:
        while size > 1:
            found = next((n // (stride // s) for n, s in digits if s <= stride < n * s and stride % s == 0), 1)
            if found == 1:
                return False
            size, stride = size // found, stride * found
    return True


def cut(ranks: np.ndarray, place: int, axes: Sequence[Digits]) -> np.ndarray:
    """Return the ranks along these axes through one position.

    Args:
        ranks: those of the root mesh.
        place: the number of a place in it.
        axes: which don't overlap.

    Returns:
        An array with one dim an axis.
    """
    found = np.array([place - sum(place // stride % size * stride for axis in axes for size, stride in axis)])
    for size, stride in (digit for axis in axes for digit in axis):
        found = (found[:, None] + np.arange(size) * stride).reshape(-1)
    return ranks.reshape(-1)[found].reshape([prod(size for size, _ in axis) for axis in axes])


def split(axis: Digits, sizes: Sequence[int]) -> list[Digits] | None:
    """One axis as several, the outer first; None where the digits that it was flattened from are not of such sizes."""
    digits, made = list(axis), []
    for wanted in reversed(sizes):
        found: list[tuple[int, int]] = []
        while wanted > 1:
            if not digits:
                return None
            size, stride = digits.pop()
            if wanted % size == 0:
                found.insert(0, (size, stride))
                wanted //= size
            elif size % wanted == 0:
                found.insert(0, (wanted, stride))
                digits.append((size // wanted, stride * wanted))
                wanted = 1
            else:
                return None
        made.insert(0, tuple(found) or ((1, 1),))
    return made if all(size == 1 for size, _ in digits) else None
