"""Values in nested lists and tuples, and sums in one fixed tree over numbered terms, whichever rank has them.

Note [The tree over micro-batches]
    Floating-point sums depend on their order, and a ring's order on the number of ranks. So in deterministic mode a
    gradient is summed along a binary tree over the micro-batches' *global* numbers: neighbours 2i and 2i+1 first, then
    those sums, and so on; if the number is not a power of two, a sum without a right neighbour moves up unchanged. A
    rank that ran micro-batches ``start`` to ``start + count`` adds up its complete subtrees, at most
    ``2 * log2(count)`` of them, and sends these instead of ``count`` gradients; the receiving ranks go on from there.
    If ``count`` is a power of two there is one subtree, so the traffic is that of a reduce-scatter.

Note [No closure calls itself]
    A function inside another one that calls itself is held by its own cell. It, and each tensor, module and group that
    it sees, then live until Python's collector runs. So what walks nested values is a function of a module and is
    handed what it needs. ``python docs/structure.py --check`` finds closures that call themselves or each other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from running inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def subtrees(start: int, count: int) -> list[tuple[int, int]]:
    """Return the largest complete subtrees that make up micro-batches ``start`` to ``start + count``.

    Example:
        >>> subtrees(6, 6)          # 6 and 7, 8 to 11
        [(6, 2), (8, 4)]

    Args:
        start: global number of the first.
        count: number of micro-batches.

    Returns:
        First number and size of each, in order.
    """
    trees = []
    stop = start + count
    while start < stop:
        size = start & -start if start else 1 << (stop - start).bit_length()
        while start + size > stop:
            size //= 2
        trees.append((start, size))
        start += size
    return trees


@dataclass(slots=True)
class _Subtree(Generic[T]):
    start: int
    size: int
    value: T


class TreeSum(Generic[T]):
    """Adds neighbouring subtrees, pushed in order, as soon as they make a larger one.

    Example:
        >>> tree = TreeSum(lambda a, b: f"({a}+{b})")
        >>> for number in range(5):
        ...     tree.push(number, 1, str(number))
        >>> tree.values
        ['((0+1)+(2+3))', '4']
        >>> tree.total()
        '(((0+1)+(2+3))+4)'

    Args:
        add: returns the sum of a left and a right value; it may write into them.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._stack: list[_Subtree[T]] = []

    @property
    def values(self) -> list[T]:
        """Sums of the subtrees so far: those of `subtrees`."""
        return [each.value for each in self._stack]

    @property
    def count(self) -> int:
        """Number of micro-batches so far."""
        return sum(each.size for each in self._stack)

    def push(self, start: int, size: int, value: T) -> None:
        """Add the sum of the next subtree.

        Args:
            start: global number of its first micro-batch.
            size: number of its micro-batches, a power of two that divides ``start``.
            value: their sum.
        """
        stack = self._stack
        assert size & (size - 1) == 0 and start % size == 0, (start, size)
        assert not stack or stack[-1].start + stack[-1].size == start, (stack[-1].start, stack[-1].size, start)
        stack.append(_Subtree(start, size, value))
        while len(stack) > 1 and stack[-2].size == stack[-1].size and stack[-2].start % (2 * stack[-2].size) == 0:
            right = stack.pop()
            stack[-1] = _Subtree(stack[-1].start, 2 * right.size, self._add(stack[-1].value, right.value))

    def total(self) -> T:
        """Return the sum of all micro-batches, once those from number 0 to the last are in."""
        assert self._stack and self._stack[0].start == 0
        value = self._stack[-1].value
        for left in reversed(self._stack[:-1]):
            value = self._add(left.value, value)
        return value


def list_leaves(value: Any) -> Iterator[Any]:
    """List what is inside nested lists, tuples and dictionaries, in order; any other value is its own one leaf.

    Example:
        >>> list(list_leaves([1, (2, {"three": 3})]))
        [1, 2, 3]
    """
    if isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from list_leaves(each)
    else:
        yield value


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``function`` to a value, or to the items of lists and tuples of their own kind.

    Example:
        >>> map_nested(lambda item: item + 1, [1, (2, [3])])
        [2, (3, [4])]
    """
    if not isinstance(value, (list, tuple)):
        return function(value)
    items = [map_nested(function, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
