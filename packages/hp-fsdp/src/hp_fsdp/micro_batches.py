"""Sums over micro-batches in one fixed tree, whichever rank ran which.

Note [The tree over micro-batches]
    Floating-point sums depend on their order, and a ring's order on the number of ranks. So in deterministic mode a
    gradient is summed along a binary tree over the micro-batches' *global* numbers: neighbours 2i and 2i+1 first, then
    those sums, and so on; where the number is no power of two, what has no right neighbour goes up as it is. A rank
    that ran micro-batches ``start`` to ``start + count`` adds up the subtrees that it holds whole, at most
    ``2 * log2(count)`` of them, and sends these instead of ``count`` gradients; the ranks that receive them go on from
    there. Where ``count`` is a power of two that is one, so as much is sent as by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["OwnMicroBatches", "TreeSum", "check_modes", "subtrees"]

T = TypeVar("T")


def subtrees(start: int, count: int) -> list[tuple[int, int]]:
    """The largest whole subtrees that make up micro-batches ``start`` to ``start + count``.

    Example:
        >>> subtrees(6, 6)          # 6 and 7, 8 to 11
        [(6, 2), (8, 4)]

    Args:
        start: global number of the first.
        count: how many.

    Returns:
        First number and size of each, in order.
    """
    found = []
    stop = start + count
    while start < stop:
        size = start & -start if start else 1 << (stop - start).bit_length()
        while start + size > stop:
            size //= 2
        found.append((start, size))
        start += size
    return found


@dataclass(slots=True)
class _Subtree(Generic[T]):
    start: int
    size: int
    value: T


class TreeSum(Generic[T]):
    """Takes subtrees in order and adds neighbours as soon as they make a larger one.

    Example:
        >>> tree = TreeSum(lambda a, b: f"({a}+{b})")
        >>> for number in range(5):
        ...     tree.push(number, 1, str(number))
        >>> tree.values
        ['((0+1)+(2+3))', '4']
        >>> tree.total()
        '(((0+1)+(2+3))+4)'

    Args:
        add: gives the sum of a left and a right value; it may write into them.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._held: list[_Subtree[T]] = []

    @property
    def values(self) -> list[T]:
        """The sums of the subtrees that are held: those that `subtrees` tells."""
        return [each.value for each in self._held]

    @property
    def count(self) -> int:
        """How many micro-batches were taken."""
        return sum(each.size for each in self._held)

    def push(self, start: int, size: int, value: T) -> None:
        """Takes the sum of the subtree that comes next.

        Args:
            start: global number of its first micro-batch.
            size: how many it has, a power of two that divides ``start``.
            value: their sum.
        """
        held = self._held
        assert size & (size - 1) == 0 and start % size == 0, (start, size)
        assert not held or held[-1].start + held[-1].size == start, (held[-1].start, held[-1].size, start)
        held.append(_Subtree(start, size, value))
        while len(held) > 1 and held[-2].size == held[-1].size and held[-2].start % (2 * held[-2].size) == 0:
            right = held.pop()
            held[-1] = _Subtree(held[-1].start, 2 * right.size, self._add(held[-1].value, right.value))

    def total(self) -> T:
        """The sum of all micro-batches, after those from number 0 to the last were taken."""
        assert self._held and self._held[0].start == 0
        value = self._held[-1].value
        for left in reversed(self._held[:-1]):
            value = self._add(left.value, value)
        return value


class OwnMicroBatches(Generic[T]):
    """A rank's own micro-batches of a step, kept until it is known how many there are and so where they stand.

    The first rank knows that its numbers start at 0, and adds up as it goes.

    Args:
        rank: the rank's place among those that share the micro-batches.
        add: as for `TreeSum`, of values that may be None, which adds nothing.
    """

    def __init__(self, rank: int, add: Callable[[T | None, T | None], T | None]) -> None:
        self._rank = rank
        self._add = add
        self.clear()

    def clear(self) -> None:
        """Drops what is kept."""
        self._tree: TreeSum[T | None] = TreeSum(self._add)
        self._kept: list[T | None] = []

    def keep(self, number: int, value: T | None) -> None:
        """Takes a micro-batch.

        Args:
            number: how many this rank ran before it in this step; those that were not taken count as None.
            value: what it gives to the sum.
        """
        if self._rank == 0:
            for index in range(self._tree.count, number + 1):
                self._tree.push(index, 1, value if index == number else None)
        else:
            self._kept += [None] * (number - len(self._kept))
            self._kept.append(value)

    def take(self, count: int) -> list[T | None]:
        """Gives up the sums of this rank's subtrees.

        Args:
            count: how many micro-batches each rank ran.
        """
        tree = self._tree
        for index, value in enumerate(self._kept):
            tree.push(self._rank * count + index, 1, value)
        self.clear()
        return tree.values


def check_modes(groups: Sequence[Any]) -> None:
    """Raises where some groups of a model are in deterministic mode and some are not.

    Raises:
        ValueError: with the first of each kind.
    """
    first = {group.deterministic: group.name for group in reversed(groups)}
    if len(first) > 1:
        raise ValueError(
            f"fully_shard: {first[True]} was sharded with deterministic=True, {first[False]} without. The bits of all"
            " weights depend on both, so give it to all modules of a model or to none"
        )
