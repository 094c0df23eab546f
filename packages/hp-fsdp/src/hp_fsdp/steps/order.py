"""Order in a step: that in which groups run, the calls that begin and end a forward, and a rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hp_platform.extend import TreeSum, subtrees

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Records the sequence of a pass and predicts from the pass before it. A wrong prediction costs only time.

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
        """Items visited in this pass so far."""
        return self._now

    @property
    def last(self) -> Sequence[T]:
        """Items visited in the pass before this one."""
        return self._last

    @property
    def known(self) -> bool:
        """True if there is a pass to predict from."""
        return bool(self._last)

    def start(self, expected: Sequence[T] | None = None) -> None:
        """Begin a pass.

        Args:
            expected: the sequence to predict from. Default: the items of the pass that ends here, if there are any.
        """
        if expected is not None:
            self._last = expected
        elif self._now:
            self._last = self._now
        self._now = []
        self._at = 0

    def visit(self, item: T) -> T | None:
        """Record ``item`` and return the one after it in the last pass; None at its end or if unknown."""
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


class Span:
    """The calls of a group's modules in one forward pass: the first begins the group's forward, the last ends it.

    Args:
        modules: the group's; each is called once, in any order. Empty: each call begins and ends the forward.
        around: wraps the forward of a call while gradients are recorded. Default: no wrapper.
    """

    __slots__ = ("_left", "around", "modules")

    def __init__(self, modules: Sequence[Any], around: Callable[[Any], Any] | None = None) -> None:
        self.modules = modules
        self.around = around
        self._left: set[int] = set()

    def begins(self, module: Any) -> bool:
        """Record the call of a module; return True for the first one of a pass."""
        first = not self._left
        if first:
            self._left = set(map(id, self.modules))
        return first

    def ends(self, module: Any) -> bool:
        """Record the return of a module's call; return True for the last one of a pass."""
        self._left.discard(id(module))
        return not self._left

    @property
    def open(self) -> bool:
        """True while some modules have run and some have not."""
        return bool(self._left)

    def close(self) -> None:
        """End the pass, even if some modules have not run."""
        self._left.clear()


class _Inside(Span):
    """A call inside of another one of the same group, which neither begins nor ends a forward."""

    __slots__ = ()

    def begins(self, module: Any) -> bool:
        return False

    def ends(self, module: Any) -> bool:
        return False


INSIDE = _Inside(())

__all__ = ["OwnMicroBatches", "TreeSum", "check_modes", "skip_none", "subtrees"]


def skip_none(add: Callable[[T, T], T]) -> Callable[[T | None, T | None], T | None]:
    """Return a function that adds two values of which each may be None, which adds nothing."""

    def added(left: T | None, right: T | None) -> T | None:
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)

    return added


class OwnMicroBatches(Generic[T]):
    """A rank's own micro-batches of a step, pending until their number and so their global numbers are known.

    The numbers of the first rank start at 0, so it adds them up at once.

    Args:
        rank: the rank's index among those that share the micro-batches.
        add: as for `TreeSum`, of values that may be None, which adds nothing.
    """

    def __init__(self, rank: int, add: Callable[[T | None, T | None], T | None]) -> None:
        self._rank = rank
        self._add = add
        self.clear()

    def clear(self) -> None:
        """Drop all micro-batches."""
        self._tree: TreeSum[T | None] = TreeSum(self._add)
        self._pending: list[T | None] = []

    def keep(self, number: int, value: T | None) -> None:
        """Add a micro-batch.

        Args:
            number: number of micro-batches before it on this rank in this step; missing ones count as None.
            value: its summand.
        """
        if self._rank == 0:
            for index in range(self._tree.count, number + 1):
                self._tree.push(index, 1, value if index == number else None)
        else:
            self._pending += [None] * (number - len(self._pending))
            self._pending.append(value)

    def take(self, count: int) -> list[T | None]:
        """Return the sums of this rank's subtrees, and drop them.

        Args:
            count: number of micro-batches on each rank.
        """
        tree = self._tree
        for index, value in enumerate(self._pending):
            tree.push(self._rank * count + index, 1, value)
        self.clear()
        return tree.values


def check_modes(groups: Sequence[Any]) -> None:
    """Raise if some groups of a model are in deterministic mode and some are not.

    Raises:
        ValueError: with the first of each kind.
    """
    first = {group.deterministic: group.name for group in reversed(groups)}
    if len(first) > 1:
        raise ValueError(
            f"fully_shard: {first[True]} was sharded with deterministic=True, {first[False]} without. The bits of all"
            " weights depend on both, so give it to all modules of a model or to none"
        )
