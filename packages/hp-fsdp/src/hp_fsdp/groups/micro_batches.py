"""A rank's own micro-batches of a step: Note [The tree over micro-batches] in `hp_platform.values`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from hp_platform.extend import TreeSum, subtrees

__all__ = ["OwnMicroBatches", "TreeSum", "check_modes", "subtrees"]

T = TypeVar("T")


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
