"""Errors that are of the fitting type and of the type that torch raises in the same situation."""

from __future__ import annotations


class GraphError(ValueError, RuntimeError):
    """A tensor that would be detached from its graph."""


class LocalMapError(ValueError, AssertionError):
    """Placements that don't fit the arguments or results of a `local_map`."""


class NoPlacementsError(ValueError, RuntimeError):
    """A redistribution without a target."""


class NotLocalError(TypeError, RuntimeError):
    """An argument is not a plain tensor."""


class MeshValueError(ValueError, RuntimeError):
    """Sizes, names or ranks that do not form a mesh."""


class NoAxisError(KeyError, ValueError):
    """A mesh has no axis of that name."""


class AxisRangeError(IndexError, ValueError):
    """A mesh has no axis of that index."""


class OverlapError(KeyError, RuntimeError):
    """Axes of a mesh share ranks."""
