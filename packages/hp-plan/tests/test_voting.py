"""Who is named of what ranks have read in three computations, and who compares copies with whom."""

from __future__ import annotations

import numpy as np
import pytest

from hp_plan import Corruption, ParallelPlan, Verdict
from hp_plan.checks.sdc.copies import Column, SharedColumns, Unequal
from hp_plan.extend import Computed, Rotation, vote

NAMES = ("forward a", "forward b", "backward b", "backward a")
ORDERS = ((0, 0, 0, 1), (0, 0, 0, 2), (1, 0, 0, 3), (1, 0, 0, 4))


def readings(rotation, ranks, wrong):
    """What each rank reads in three computations; `wrong` says from which reading on one differs, and by how much."""
    everyone = []
    for rank in range(ranks):
        own = []
        for number in range(3):
            bits = np.arange(4) + 10 * rotation.place(rank, number)
            if (rank, number) in wrong:
                first, by = wrong[rank, number]
                bits[first:] += by
            own.append(Computed(NAMES, ORDERS, bits))
        everyone.append(own)
    return everyone


def named(mesh, wrong):
    rotation = Rotation(ParallelPlan.from_dict({"mesh": mesh}))
    ranks = sum(map(len, rotation.copies))
    found = vote(rotation, readings(rotation, ranks, wrong))
    return [(each.ranks, each.name, each.verdict) for each in found]


ONCE, LASTING, OPEN = Verdict.TRANSIENT, Verdict.PERSISTENT, Verdict.UNDECIDED
VOTES = [
    ({"dp_shard": 3}, {}, []),
    ({"dp_shard": 3}, {(1, 0): (1, 5)}, [((1,), "forward b", ONCE)]),
    ({"dp_shard": 4}, {(2, 2): (3, 5)}, [((2,), "backward a", ONCE)]),
    ({"dp_shard": 3}, {(1, n): (1, 5) for n in range(3)}, [((1,), "forward b", LASTING)]),
    ({"dp_shard": 3}, {(1, 0): (1, 5), (2, 1): (2, 6)}, [((1,), "forward b", ONCE), ((2,), "backward b", ONCE)]),
    ({"dp_shard": 3}, {(1, 0): (1, 5), (0, 1): (1, 6)}, [((0, 1, 2), "forward b", OPEN)]),
    ({"dp_shard": 2}, {(1, 0): (1, 5)}, [((1,), "forward b", ONCE)]),
    ({"dp_shard": 2}, {(1, 1): (1, 5)}, [((1,), "forward b", ONCE)]),
    ({"dp_shard": 2}, {(1, n): (1, 5) for n in range(3)}, [((0, 1), "forward b", LASTING)]),
    ({"dp_shard": 2}, {(1, n): (1, 5 + n) for n in range(3)}, [((1,), "forward b", LASTING)]),
    ({}, {(0, 0): (1, 5)}, [((0,), "forward b", ONCE)]),
    ({}, {(0, n): (1, 5 + n) for n in range(3)}, [((0,), "forward b", LASTING)]),
    ({"dp_shard": 3, "tp": 2}, {(2, 0): (1, 5), (3, 0): (2, 9)}, [((2,), "forward b", ONCE)]),
]


@pytest.mark.parametrize(("mesh", "wrong", "expected"), VOTES, ids=str)
def test_a_vote_names_the_rank_that_was_wrong_first(mesh, wrong, expected):
    assert named(mesh, wrong) == expected


@pytest.mark.parametrize(
    ("mesh", "copies"),
    [
        ({"dp_shard": 4, "ep": 2}, ((0, 1), (2, 3))),
        ({"dp_shard": 2, "ep": 2}, ((0, 1),)),
        ({"dp_replicate": 2, "dp_shard": 2}, ((0,), (1,), (2,), (3,))),
        ({"dp_shard": 2, "pp": 2}, ((0, 2), (1, 3))),
        ({"dp_shard": 2, "cp": 2, "ep": 2}, ((0, 1), (2, 3))),
    ],
    ids=str,
)
def test_ranks_that_compute_together_rotate_together(mesh, copies):
    assert Rotation(ParallelPlan.from_dict({"mesh": mesh})).copies == copies


def test_what_was_sent_otherwise_than_it_arrived_is_the_wire():
    rotation = Rotation(ParallelPlan.from_dict({"mesh": {"dp_shard": 3}}))
    everyone = readings(rotation, 3, {(1, 0): (0, 5)})
    own = everyone[1][0]
    everyone[1][0] = Computed(own.names, own.orders, own.bits, (("layers.0", 2, 7, 8),))
    (found,) = vote(rotation, everyone)
    assert (found.ranks, found.where, found.name, found.bits) == ((1,), "wire", "layers.0 from rank 2", (8, 7))
    assert Computed.decode(everyone[1][0].encode()).wires == everyone[1][0].wires


def test_most_copies_are_right():
    column = Column(1, "", "norm.weight")
    assert Unequal(column, {0: 5, 1: 6, 4: 5}).wrong == (1,)
    two = Unequal(column, {0: 5, 1: 6})
    assert two.wrong == (0, 1) and not two.decided and two.verdict is OPEN
    assert Unequal(column, {0: 5, 1: 6, 2: 5, 3: 6}).wrong == (0, 1, 2, 3)


def test_ranks_that_have_copies_in_common_compare_together():
    held = [(1, 2), (1, 3), (4, 2), (4, 3), (5,), (5,), (6,)]  # dp_replicate 2 x tp 2, then two ranks, then one
    copies = SharedColumns(held, ("", "exp_avg"), {1: "a", 2: "b"}, rank=0)
    assert copies.ranks == (0, 1, 2, 3) and len(copies.columns) == 8
    assert dict(copies.numbers(2)) == {"": 2, "exp_avg": 3} and not dict(copies.numbers(6))
    assert SharedColumns(held, ("",), {}, rank=6).columns == ()


def test_a_corruption_is_read_back():
    found = Corruption(3, (1, 2), ("a", "a"), "moment", "norm.weight/exp_avg", OPEN, (5, 6), "reported")
    assert Corruption.from_dict(found.to_dict()) == found
    expected = "step 3: undecided corruption of state norm.weight/exp_avg on one of ranks 1, 2 (a): reported"
    assert str(found) == expected
