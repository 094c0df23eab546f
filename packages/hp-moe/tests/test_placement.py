"""Placements of experts, and replicas of hot ones."""

from __future__ import annotations

import random

import pytest

from hp_moe import ExpertPlacement, plan_replicas


def zipf(experts: int, exponent: float, seed: int) -> list[int]:
    """Draw the tokens of experts, the most popular anywhere."""
    weights = [1 / (place + 1) ** exponent for place in range(experts)]
    random.Random(seed).shuffle(weights)
    return [int(1_000_000 * weight / sum(weights)) for weight in weights]


def worst(placement: ExpertPlacement, load: list[int]) -> float:
    loads = placement.loads(placement.shares([load]))
    assert sum(loads) == sum(load)
    return max(loads) * len(loads) / sum(loads)


def test_even_placements_may_be_uneven():
    placement = ExpertPlacement.even(5, 3)
    assert placement.home == (0, 0, 1, 1, 2)
    assert placement.local == ((0, 1), (2, 3), (4,))
    assert eval(repr(placement)) == placement


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: ExpertPlacement.even(3, 4), "3 experts cannot be spread over 4 ranks"),
        (lambda: ExpertPlacement((0, 1), ((), (1,)), 2), r"expert 1 is held by the ranks \(1, 1\)"),
        (lambda: ExpertPlacement((0, 2), ((), ()), 2), r"expert 1 is held by the ranks \(2,\)"),
        (lambda: ExpertPlacement((0, 0), ((),), 1), "2 homes, but replicas of 1 experts"),
        (lambda: plan_replicas([1], ExpertPlacement.even(2, 2)), "loads of 1 experts, but 2 are placed"),
        (lambda: plan_replicas([1, -1], ExpertPlacement.even(2, 2)), "must not be negative"),
    ],
)
def test_what_does_not_fit_is_refused(build, text):
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (256, 32)])
def test_one_replica_a_rank_evens_out_hot_experts(experts, ranks):
    plain = ExpertPlacement.even(experts, ranks)
    before, after = [], []
    for seed in range(10):
        load = zipf(experts, 1.0, seed)
        planned = plan_replicas(load, plain)
        assert all(len(each) - experts // ranks <= 1 for each in planned.local)
        assert planned.home == plain.home
        before.append(worst(plain, load))
        after.append(worst(planned, load))
        assert plan_replicas(load, planned) == planned  # nothing to gain: weights stay where they are
    assert sum(before) / 10 > 2
    assert sum(after) / 10 <= 1.1


@pytest.mark.parametrize("whole", [False, True])
def test_shares_send_every_token_to_a_holder(whole):
    draw = random.Random(0)
    for _ in range(50):
        ranks, experts = draw.randint(1, 5), draw.randint(5, 12)
        home = tuple(draw.randrange(ranks) for _ in range(experts))
        others = [[rank for rank in range(ranks) if rank != here] for here in home]
        placement = ExpertPlacement(
            home, tuple(tuple(sorted(draw.sample(o, draw.randint(0, len(o))))) for o in others), ranks
        )
        counts = [[draw.choice([0, 1, 7, 100]) for _ in range(experts)] for _ in range(ranks)]
        shares = placement.shares(counts, whole=whole)
        for row, own in zip(counts, shares, strict=True):
            for tokens, parts, holders in zip(row, own, placement.holders, strict=True):
                assert sum(parts) == tokens and len(parts) == len(holders) and min(parts) >= 0
                assert not whole or sum(part > 0 for part in parts) <= 1
