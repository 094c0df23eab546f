"""ExecutionOrder: recalls in which order things ran last time, to say which one comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["ExecutionOrder"]

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Records the sequence of a pass and predicts from the pass before it. A wrong prediction costs time, nothing else.

    Example:
        >>> order = ExecutionOrder()
        >>> [order.visit(name) for name in "abc"]
        [None, None, None]
        >>> order.start()
        >>> [order.visit(name) for name in "abc"]
        ['b', 'c', None]
    """

    __slots__ = ("_at", "_last", "_now")

    def __init__(self) -> None:
        self._last: Sequence[T] = ()
        self._now: list[T] = []
        self._at = 0

    @property
    def now(self) -> Sequence[T]:
        """What was visited in this pass so far."""
        return self._now

    @property
    def last(self) -> Sequence[T]:
        """What was visited in the pass before this one."""
        return self._last

    @property
    def known(self) -> bool:
        """Whether there is a pass to predict from."""
        return bool(self._last)

    def start(self, expected: Sequence[T] | None = None) -> None:
        """Begins a pass.

        Args:
            expected: the sequence to predict from. Default: what was visited in the pass that ends here, if anything
                was.
        """
        if expected is not None:
            self._last = expected
        elif self._now:
            self._last = self._now
        self._now = []
        self._at = 0

    def visit(self, item: T) -> T | None:
        """Records ``item`` and returns what came after it in the last pass; None at its end or if unknown."""
        self._now.append(item)
        last, at = self._last, self._at
        if at >= len(last) or last[at] is not item:
            for at in (*range(self._at, len(last)), *range(min(self._at, len(last)))):
                if last[at] is item:
                    break
            else:
                return None
        self._at = at = at + 1
        return last[at] if at < len(last) else None
