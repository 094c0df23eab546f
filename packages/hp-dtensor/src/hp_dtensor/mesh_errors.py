"""Errors of meshes that are of two kinds at once: the one that fits, and the one that torch's DeviceMesh raises."""

from __future__ import annotations

__all__ = ["AxisRangeError", "MeshValueError", "NoAxisError", "OverlapError"]


class MeshValueError(ValueError, RuntimeError):
    """Sizes, names or ranks that make no mesh."""


class NoAxisError(KeyError, ValueError):
    """A mesh has no axis of that name."""


class AxisRangeError(IndexError, ValueError):
    """A mesh has no axis of that index."""


class OverlapError(KeyError, RuntimeError):
    """Axes of a mesh share ranks."""
