"""Numbers of tokens in place of a router's choice."""

from __future__ import annotations

import pytest

from hp_moe.extend import balanced, forced_routes, skewed
from hp_moe.routes.forced import forced_counts


def test_balanced_and_skewed_counts_are_those_of_all_tokens() -> None:
    assert balanced(5, 2, 4) == [3, 3, 2, 2]
    for factor in (1.0, 1.5, 2.0):
        counts = skewed(factor)(100, 2, 8)
        assert sum(counts) == 200 and max(counts) <= 100
        assert counts[0] == pytest.approx(25 * factor, abs=2)
        assert factor == 1 or counts[0] > counts[-1]
    with pytest.raises(ValueError, match="a factor of 2.5 is not from 1 to 2"):
        skewed(2.5)


def test_counts_are_forced_inside_alone() -> None:
    assert forced_counts(4, 1, 2) is None
    with forced_routes(balanced):
        assert forced_counts(4, 1, 2) == [2, 2]
    with forced_routes(lambda tokens, choices, experts: [5, -1]), pytest.raises(ValueError, match="counts .5, -1."):
        forced_counts(4, 1, 2)
    assert forced_counts(4, 1, 2) is None
