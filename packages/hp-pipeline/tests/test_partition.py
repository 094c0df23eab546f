"""The cut of a line of blocks, against all cuts."""

from __future__ import annotations

import itertools
import random

import pytest

from hp_pipeline.stages.split import partition

pytestmark = pytest.mark.framework("torch")  # nothing of a framework: once is enough


def cuts(count, stages):
    for inner in itertools.combinations(range(1, count), stages - 1):
        ends = [0, *inner, count]
        yield tuple(end - start for start, end in itertools.pairwise(ends))


def largest(values, counts):
    each = iter(values)
    return max(sum(itertools.islice(each, count)) for count in counts)


def test_the_slowest_stage_takes_the_least_time_of_all_cuts():
    rng = random.Random(7)
    for _ in range(150):
        count = rng.randint(1, 9)
        costs = [rng.choice([0.0, 1.0, rng.random(), 5 * rng.random()]) for _ in range(count)]
        sizes = [rng.randint(1, 4) for _ in range(count)]
        for stages in range(1, count + 1):
            best = min(largest(costs, each) for each in cuts(count, stages))
            chosen = partition(costs, stages)
            assert len(chosen) == stages and sum(chosen) == count and min(chosen) >= 1
            assert largest(costs, chosen) == pytest.approx(best, abs=1e-12)
            limit = rng.randint(2, 12)
            legal = [each for each in cuts(count, stages) if largest(sizes, each) <= limit]
            if not legal:
                with pytest.raises(ValueError, match=f"no cut of {count} blocks into {stages} stages keeps each"):
                    partition(costs, stages, sizes, limit)
                partition(costs, stages, sizes, sum(sizes))
                assert limit < max(sizes) or partition(costs, count, sizes, limit) == (1,) * count
                continue
            chosen = partition(costs, stages, sizes, limit)
            assert largest(sizes, chosen) <= limit
            expected = min(largest(costs, each) for each in legal)
            assert largest(costs, chosen) == pytest.approx(expected, abs=1e-12)


def test_equal_blocks_are_cut_evenly():
    assert partition([1.0] * 8, 4) == (2, 2, 2, 2)
    assert partition([1.0, 1.0, 1.0, 3.0], 2) == (3, 1)


def test_more_stages_than_blocks():
    with pytest.raises(ValueError, match="5 stages cannot be cut out of 4 blocks"):
        partition([1.0] * 4, 5)
