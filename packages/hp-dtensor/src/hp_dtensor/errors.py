"""Errors of two kinds at once: the kind that fits, and the kind that torch raises in the same place."""

from __future__ import annotations

__all__ = [
    "AxisRangeError",
    "GraphError",
    "LocalMapError",
    "MeshValueError",
    "NoAxisError",
    "NoPlacementsError",
    "NotLocalError",
    "OverlapError",
]


class GraphError(ValueError, RuntimeError):
    """A tensor whose graph would be cut."""


class LocalMapError(ValueError, AssertionError):
    """Placements that don't fit the arguments or results of a `local_map`."""


class NoPlacementsError(ValueError, RuntimeError):
    """A redistribution to nowhere."""


class NotLocalError(TypeError, RuntimeError):
    """What should be a plain tensor is none."""


class MeshValueError(ValueError, RuntimeError):
    """Sizes, names or ranks that make no mesh."""


class NoAxisError(KeyError, ValueError):
    """A mesh has no axis of that name."""


class AxisRangeError(IndexError, ValueError):
    """A mesh has no axis of that index."""


class OverlapError(KeyError, RuntimeError):
    """Axes of a mesh share ranks."""
