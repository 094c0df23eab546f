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
        TypeError: a single string, or something else than strings.
        ValueError: repeated names, or a number of names that is not the number of axes.
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
            factor = next((n // (stride // s) for n, s in digits if s <= stride < n * s and stride % s == 0), 1)
            if factor == 1:
                return False
            size, stride = size // factor, stride * factor
    return True


def cut(ranks: np.ndarray, position: int, axes: Sequence[Digits]) -> np.ndarray:
    """Return the ranks along these axes through one position.

    Args:
        ranks: those of the root mesh.
        position: the number of a place in it.
        axes: which don't overlap.

    Returns:
        An array with one dim an axis.
    """
    positions = np.array([position - sum(position // stride % size * stride for axis in axes for size, stride in axis)])
    for size, stride in (digit for axis in axes for digit in axis):
        positions = (positions[:, None] + np.arange(size) * stride).reshape(-1)
    return ranks.reshape(-1)[positions].reshape([prod(size for size, _ in axis) for axis in axes])


def split(axis: Digits, sizes: Sequence[int]) -> list[Digits] | None:
    """One axis as several, the outer first; None where the digits that it was flattened from are not of such sizes."""
    digits, axes = list(axis), []
    for remaining in reversed(sizes):
        terms: list[tuple[int, int]] = []
        while remaining > 1:
            if not digits:
                return None
            size, stride = digits.pop()
            if remaining % size == 0:
                terms.insert(0, (size, stride))
                remaining //= size
            elif size % remaining == 0:
                terms.insert(0, (remaining, stride))
                digits.append((size // remaining, stride * remaining))
                remaining = 1
            else:
                return None
        axes.insert(0, tuple(terms) or ((1, 1),))
    return axes if all(size == 1 for size, _ in digits) else None
