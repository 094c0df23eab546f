"""The cache of blocks whose parameters live on the host: the fewest bytes, in the order of the uses."""

from __future__ import annotations

import functools
import math
import random

import pytest

from hp_offload import CheckpointPolicy, ParameterVisits, Saved, plan_memory
from hp_offload.homes.planning import parts_to_evict, plan_cache

SINGLE = {name: [name] for name in "abcdefgh"}


def there_and_back(blocks: int) -> str:
    names = "abcdefgh"[:blocks]
    return names + names[::-1]


def fewest_bytes(order, parts, sizes, cache: int) -> int:
    """Try each set that may stay at each use."""

    @functools.cache
    def rest(index: int, held: frozenset[str]) -> int:
        if index == len(order):
            return 0
        needed = frozenset(parts[order[index]])
        after, copied = held | needed, sum(sizes[part] for part in needed - held)
        others = sorted(after - needed)
        results = []
        for chosen in range(2 ** len(others)):
            stay = needed | {part for bit, part in enumerate(others) if chosen >> bit & 1}
            if sum(sizes[part] for part in stay) <= cache:
                results.append(rest(index + 1, stay))
        return copied + min(results)

    return rest(0, frozenset())


def play(plan, order, parts, sizes, cache, ahead):
    """Do what a plan says, and check that each use finds its parts and that nothing is over the cache."""
    held, peak, fetched, evicted = set(), 0, 0, 0
    for index, (use, block) in enumerate(zip(plan.uses, order, strict=True)):
        assert use.block == block and not set(use.evicted) & set(parts[block])
        held -= set(use.evicted)
        assert not held & set(use.fetched)
        held |= set(use.fetched)
        assert set(parts[block]) <= held and sum(sizes[part] for part in held) <= cache
        near = {part for each in order[index : index + ahead + 1] for part in parts[each]}
        assert set(use.fetched) <= near
        peak = max(peak, sum(sizes[part] for part in held))
        fetched += sum(sizes[part] for part in use.fetched)
        evicted += sum(sizes[part] for part in use.evicted)
    assert (peak, fetched, evicted) == (plan.peak, plan.fetched, plan.evicted)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("cache", [1, 2, 3, 5])
def test_no_choice_copies_less_where_blocks_are_equal(cache, ahead):
    draw = random.Random(cache)
    orders = [there_and_back(5), "abcabcabc", "abacabadab"]
    orders += ["".join(draw.choice("abcdef") for _ in range(12)) for _ in range(20)]
    sizes = dict.fromkeys(SINGLE, 1)
    for order in orders:
        plan = plan_cache(order, SINGLE, sizes, cache, ahead=ahead)
        play(plan, order, SINGLE, sizes, cache, ahead)
        if ahead < cache:  # all that is copied ahead has room
            together = {str(index): order[index : index + ahead + 1] for index in range(len(order))}
            assert plan.fetched == fewest_bytes(tuple(together), together, sizes, cache), order


def test_blocks_of_other_sizes_stay_near_the_fewest():
    draw = random.Random(0)
    planned = least = 0
    for _ in range(200):
        sizes = {name: draw.randint(1, 6) for name in "abcde"}
        parts = {name: [name] for name in "abcde"} | {"a": ["a", "e"], "b": ["e", "b"]}
        order = "".join(draw.choice("abcd") for _ in range(10))
        cache, ahead = draw.randint(12, 16), draw.randint(0, 2)
        plan = plan_cache(order, parts, sizes, cache, ahead=ahead)
        play(plan, order, parts, sizes, cache, ahead)
        fewest = fewest_bytes(order, parts, sizes, cache)
        assert plan.fetched >= fewest
        planned, least = planned + plan.fetched, least + fewest
    assert planned < 1.1 * least


def test_a_forward_and_its_backward():
    plan = plan_cache(there_and_back(4), SINGLE, dict.fromkeys(SINGLE, 10), 20)
    assert [(use.block, use.evicted, use.fetched, use.ahead) for use in plan.uses] == [
        ("a", (), ("a", "b"), 1),
        ("b", ("a",), ("c",), 1),
        ("c", ("b",), ("d",), 1),  # c is used again before b
        ("d", (), (), 0),
        ("d", (), (), 0),
        ("c", ("d",), ("b",), 1),
        ("b", ("c",), ("a",), 1),
        ("a", (), (), 0),
    ]
    assert (plan.fetched, plan.evicted, plan.peak) == (60, 40, 20)


def test_what_is_ahead_waits_for_room():
    plan = plan_cache("abca", SINGLE, dict.fromkeys(SINGLE, 1), 2, ahead=2)
    assert [use.fetched for use in plan.uses] == [("a", "b"), ("c",), ("a",), ()]
    assert [use.evicted for use in plan.uses] == [(), ("a",), ("b",), ()]


def test_what_need_not_leave_stays():
    uses = {"a": 9, "b": 8, "c": 7}
    assert parts_to_evict({"a": 1, "b": 9, "c": 1}, 9, 11, (), uses.__getitem__) == ["b"]
    assert parts_to_evict({"a": 1, "b": 1}, 2, 3, ["a"], uses.__getitem__) == ["b"]
    assert parts_to_evict({"a": 1, "b": 1}, 3, 3, ["a"], uses.__getitem__) is None


def test_bad_input():
    with pytest.raises(ValueError, match=r"A cache of 9 bytes is smaller than block 'b', .* 11: give cache=11"):
        plan_cache("ab", {"a": ["a"], "b": ["a", "b", "b"]}, {"a": 1, "b": 10}, 9)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        plan_cache("a", SINGLE, {"a": 1}, 9, ahead=-1)
    assert plan_cache("", {}, {}, 0).uses == ()


@pytest.mark.parametrize("bandwidth", [0.0, 0.3, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("swappable", [True, False])
def test_one_budget_is_the_fastest_of_all_caches_and_plans(bandwidth, swappable):
    pytest.importorskip("scipy", reason="plan_memory needs scipy, in hp-offload's extra plan")
    names = "abcdef"
    saved = [
        Saved(f"{name}#0", 10, place + 1.0, 18 - 2.0 * place, 1.0 if place else math.inf, swappable)
        for place, name in enumerate(names)
    ]
    parts = {name: [name] for name in names}
    visits = ParameterVisits(there_and_back(6), parts, dict.fromkeys(names, 7), gradients=42)
    before = math.inf
    for budget in (27, 35, 48, 60, 80, 102, 200):
        plan = plan_memory(saved, budget, bandwidth, visits=visits)
        steps = {}
        for cache in range(7, 43, 7):
            try:
                rest = plan_memory(saved, budget - cache, bandwidth)
            except ValueError:
                continue
            uses = plan_cache(visits.order, parts, visits.sizes, cache)
            assert visits.copied(cache)[0] == uses.fetched
            swapped = rest.total(CheckpointPolicy.MUST_SWAP)
            link = (max(uses.fetched, 42) + swapped) / (bandwidth or math.inf)
            late = sum(7 * (len(use.fetched) - use.ahead) for use in uses.uses) / (bandwidth or math.inf)
            steps[cache] = max(rest.predicted_step + late, link), uses.fetched + swapped
        assert plan.cache == min(steps, key=lambda cache: steps[cache])
        assert plan.predicted_step == steps[plan.cache][0] <= before and plan.predicted_peak <= budget
        before = plan.predicted_step
    assert "a cache of 42 B for parameters" in str(plan), "all of them fit"
    with pytest.raises(ValueError, match=r"the least that this step needs, 27 B \(27 bytes\), by 7 B"):
        plan_memory(saved, 20, bandwidth, visits=visits)


def test_caches_to_choose_from():
    sizes = {str(number): 5 for number in range(100)}
    caches = ParameterVisits((), {name: [name] for name in sizes}, sizes).caches()
    assert caches[0] == 5 and caches[-1] == 500 and len(caches) == 16
    assert ParameterVisits((), {"a": ["x", "y"], "b": ["y"]}, {"x": 2, "y": 3}).caches() == [5]
