"""Sums over micro-batches don't depend on who holds which."""

from __future__ import annotations

import pytest

from hp_fsdp.steps.order import OwnMicroBatches, TreeSum, subtrees


def text(left: str, right: str) -> str:
    return f"({left}+{right})"


@pytest.mark.parametrize("total", [1, 2, 3, 5, 6, 7, 8, 12, 24, 30])
def test_the_tree_is_the_same_for_any_number_of_ranks(total: int):
    alone: TreeSum[str] = TreeSum(text)
    for number in range(total):
        alone.push(number, 1, str(number))
    for ranks in (ranks for ranks in range(1, total + 1) if total % ranks == 0):
        count = total // ranks
        joined: TreeSum[str] = TreeSum(text)
        for rank in range(ranks):
            own: TreeSum[str] = TreeSum(text)
            for number in range(rank * count, (rank + 1) * count):
                own.push(number, 1, str(number))
            parts = subtrees(rank * count, count)
            assert len(parts) == len(own.values)
            for (start, size), value in zip(parts, own.values):
                joined.push(start, size, value)
        assert joined.total() == alone.total()


def test_neighbours_first():
    tree: TreeSum[str] = TreeSum(text)
    for number in range(6):
        tree.push(number, 1, str(number))
    assert tree.total() == "(((0+1)+(2+3))+(4+5))"
    assert tree.count == 6


def test_own_micro_batches_are_summed_where_they_stand():
    def add(left: str | None, right: str | None) -> str | None:
        return text(left, right) if left and right else left or right

    first, second = OwnMicroBatches(0, add), OwnMicroBatches(1, add)
    for own in (first, second):
        for number in (0, 1, 2, 4, 5):  # nothing from the one between
            own.keep(number, str(number))
    assert first.take(6) == ["((0+1)+2)", "(4+5)"]
    assert second.take(6) == ["(0+1)", "(2+(4+5))"]
    second.keep(0, "again")
    assert second.take(1) == ["again"]
    first.keep(0, "dropped")
    first.clear()
    assert first.take(1) == []


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 5, [(0, 4), (4, 1)]),
        (3, 3, [(3, 1), (4, 2)]),
        (6, 6, [(6, 2), (8, 4)]),
        (8, 8, [(8, 8)]),
        (0, 8, [(0, 8)]),
        (5, 1, [(5, 1)]),
    ],
)
def test_subtrees(start: int, count: int, expected: list[tuple[int, int]]):
    assert subtrees(start, count) == expected
