"""Ranks that tell each other short texts and numbers, and raise together."""

from __future__ import annotations

import functools
import math

import pytest

from hp_platform import LostRankError, count_collectives, get_platform
from hp_platform.extend import agree, describe, gather_bytes, reduce_numbers, share_bytes, share_numbers
from hp_testing import on_ranks

LONG = 1000


def group_and_rank():
    groups = get_platform().groups
    return groups.default_group(), groups.rank()


@on_ranks(3)
def test_payloads_of_any_length_come_to_all_ranks():
    group, rank = group_and_rank()
    for payloads in (
        [b"", b"\0", b"ab\0"],
        [b"long" * LONG, b"", b"long" * LONG],
        [b"x" * 64, b"x" * 65, b"x" * LONG],
        [b"x" * LONG + b"%d" % each for each in range(3)],
    ):
        assert share_bytes(payloads[rank], group) == payloads
    assert gather_bytes(b"%d" % rank, group) == [b"0", b"1", b"2"]
    assert share_bytes(b"own", None) == gather_bytes(b"own", None) == [b"own"]


@on_ranks(3)
def test_equal_payloads_are_sent_as_one_digest():
    group, rank = group_and_rank()
    with count_collectives() as counts:
        assert share_bytes(b"same" * LONG, group) == [b"same" * LONG] * 3
    assert counts == {"all_gather": 1}
    with count_collectives() as counts:
        share_bytes(b"same" * LONG if rank else b"other" * LONG, group)
    assert counts == {"all_gather": 1, "broadcast": 2}


@on_ranks(3)
def test_numbers_of_each_rank_come_to_all_ranks_exactly():
    group, rank = group_and_rank()
    with count_collectives() as counts:
        rows = share_numbers([2**62 + rank, 0.1 * rank, rank == 1, -math.inf], group)
    assert counts == {"all_gather": 1}
    assert rows == [[2**62 + each, 0.1 * each, each == 1, -math.inf] for each in range(3)]
    assert [type(each) for each in rows[0]] == [int, float, int, float]
    assert share_numbers([], group) == [[], [], []]


@on_ranks(3)
def test_numbers_are_reduced_place_by_place():
    group, rank = group_and_rank()
    with count_collectives() as counts:
        most = reduce_numbers([2**62 + rank, -rank], "max", group)
    assert counts == {"all_reduce": 1}
    assert most == [2**62 + 2, 0]
    assert reduce_numbers([2**53 + rank], "sum", group) == [3 * 2**53 + 3]
    assert reduce_numbers([2**-40 + rank, 1], "sum", group) == [3 + 3 * 2**-40, 3.0]
    assert reduce_numbers([0.1 * rank + 1.0], "min", group) == [1.0]
    assert reduce_numbers([], "sum", group) == []


def test_a_rank_alone_has_its_own_numbers():
    with count_collectives() as counts:
        assert share_numbers([2**62, 0.5], None) == [[2**62, 0.5]]
        assert reduce_numbers([2**62, 7], "min", None) == [2**62, 7]
    assert not counts


@on_ranks(3)
@pytest.mark.parametrize("failing", [(1,), (0, 2), (0, 1, 2)])
def test_what_some_raise_all_raise_with_the_texts_of_all(failing):
    group, rank = group_and_rank()
    error = ValueError(f"the file {'x' * 100} of rank {rank} is gone")

    def action():
        if rank in failing:
            raise error
        return b"%d" % rank

    share = functools.partial(share_bytes, group=group)
    with pytest.raises(RuntimeError, match="^together$") as raised:
        agree(action, lambda texts, own: Together(texts), share)
    assert raised.value.texts == {each: f"the file {'x' * 100} of rank {each} is gone" for each in failing}
    assert raised.value.__cause__ is (error if rank in failing else None)
    assert agree(lambda: b"%d" % rank, lambda texts, own: Together(texts), share) == [b"0", b"1", b"2"]


class Together(RuntimeError):
    def __init__(self, texts):
        super().__init__("together")
        self.texts = dict(texts)


@on_ranks(2)
def test_a_rank_may_raise_its_own_error():
    group, rank = group_and_rank()

    def action():
        raise KeyError("name")

    with pytest.raises(KeyError, match="name"):
        agree(action, lambda texts, own: own or AssertionError(texts), functools.partial(share_bytes, group=group))


def test_a_lost_rank_is_told_to_nobody():
    def action():
        raise LostRankError("rank 1 was lost", [1])

    def nobody(payload):
        raise AssertionError("there is nobody to hear it")

    with pytest.raises(LostRankError):
        agree(action, lambda texts, own: AssertionError(texts), nobody)


def test_texts_of_errors():
    assert describe(ValueError("no")) == describe(TypeError("no")) == "no"
    assert describe(KeyError("w")) == "KeyError: 'w'"
