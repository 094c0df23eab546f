"""Shapes of all ranks, in one message of a size that never differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import DeviceMesh
from hp_styles import port

__all__ = ["shapes_of_ranks"]

_DIMS = 8  # of a shape


def shapes_of_ranks(values: Sequence[Any | None], mesh: DeviceMesh) -> list[list[tuple[int, ...]]] | None:
    """Gather the shapes that each rank of a mesh has of some tensors.

    Args:
        values: as many on every rank; the shape of None is empty.
        mesh: the ranks.

    Returns:
        A row of shapes for each rank; None where autograd runs a module again, with what has been compared.
    """
    shapes = [() if value is None else tuple(value.shape[:_DIMS]) for value in values]
    numbers = [n for shape in shapes for n in (*shape, *[-1] * (_DIMS - len(shape)))]
    found = port.modules().gather_numbers(numbers, mesh, next(value for value in values if value is not None))
    if found is None:
        return None
    each = [tuple(n for n in found[i : i + _DIMS] if n >= 0) for i in range(0, len(found), _DIMS)]
    return [each[i : i + len(values)] for i in range(0, len(each), len(values))]
