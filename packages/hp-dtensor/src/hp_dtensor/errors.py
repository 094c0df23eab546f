"""Errors that are of two kinds at once: the one that fits, and the one that torch raises in the same place."""

from __future__ import annotations

__all__ = ["GraphError", "LocalMapError", "NoPlacementsError", "NotLocalError"]


class GraphError(ValueError, RuntimeError):
    """A tensor whose graph would be cut."""


class LocalMapError(ValueError, AssertionError):
    """Placements that don't fit the arguments or results of a `local_map`."""


class NoPlacementsError(ValueError, RuntimeError):
    """A redistribution to nowhere."""


class NotLocalError(TypeError, RuntimeError):
    """What should be a plain tensor is none."""
