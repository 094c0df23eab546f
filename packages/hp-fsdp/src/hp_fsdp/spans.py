"""Span: which calls of a group's modules begin and end the group's forward, where it is not one module's one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["INSIDE", "Span"]


class Span:
    """The calls of a group's modules in one forward pass: the first begins the group's forward, the last ends it.

    Args:
        modules: of the group; each is called once, in any order. None: each call begins and ends the forward.
        around: wraps what a call runs while gradients are recorded. Default: nothing.
    """

    __slots__ = ("_left", "around", "modules")

    def __init__(self, modules: Sequence[Any], around: Callable[[Any], Any] | None = None) -> None:
        self.modules = modules
        self.around = around
        self._left: set[int] = set()

    def begins(self, module: Any) -> bool:
        """Note that a module is called; True for the first one of a pass."""
        first = not self._left
        if first:
            self._left = set(map(id, self.modules))
        return first

    def ends(self, module: Any) -> bool:
        """Note that a module's call returned; True when all did."""
        self._left.discard(id(module))
        return not self._left

    @property
    def open(self) -> bool:
        """True while some modules have run and some have not."""
        return bool(self._left)

    def close(self) -> None:
        """End the pass, whatever has run."""
        self._left.clear()


class _Inside(Span):
    """A call inside of another one of the same group, which neither begins nor ends anything."""

    __slots__ = ()

    def begins(self, module: Any) -> bool:
        return False

    def ends(self, module: Any) -> bool:
        return False


INSIDE = _Inside(())
