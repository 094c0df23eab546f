"""Hangs, told from what the ranks have noted."""

from __future__ import annotations

import pytest

from hp_platform.failures.flight import Channel, Flight, Operation
from hp_platform.failures.hangs import find_hang

WORLD, LEFT, RIGHT = Channel((0, 1, 2)), Channel((0, 1)), Channel((1, 2))
HEAD = Channel((0, 2))


def flight(rank, *issued, waits=False):
    """Return a rank's flight that has issued (channel, kind, bytes) and waits in the last one."""
    begun, last = {}, []
    for channel, kind, size in issued:
        begun[channel] = begun.get(channel, 0) + 1
        last.append(Operation(kind, channel, begun[channel], size))
    waiting = (last[-1].channel, last[-1].number) if waits else None
    return Flight(rank, 1000 + rank, "step", 4, begun, tuple(last), waiting)


def hang(*flights):
    found = find_hang({each.rank: each for each in flights})
    return found.kind, found.culprits


REDUCE = (WORLD, "all_reduce", 8)


def test_the_rank_that_waits_for_nobody_holds_up_all():
    waiting = [flight(rank, REDUCE, REDUCE, waits=True) for rank in (0, 1)]
    found = find_hang({0: waiting[0], 1: waiting[1], 2: flight(2, REDUCE)})
    assert (found.kind, found.culprits) == ("behind", (2,))
    assert found.next is not None and (found.next.kind, found.next.number) == ("all_reduce", 2)
    assert sorted(found.waits) == [0, 1]


def test_waits_are_followed_from_group_to_group():
    """Rank 0 waits for 1 in their group, which waits for 2 in another one."""
    left, right = (LEFT, "all_gather", 8), (RIGHT, "all_gather", 8)
    assert hang(flight(0, left, waits=True), flight(1, right, waits=True), flight(2)) == ("behind", (2,))


def test_groups_in_different_orders_are_a_circle():
    first, second, third = ((channel, "barrier", 0) for channel in (LEFT, RIGHT, HEAD))
    assert hang(*(flight(rank, each, waits=True) for rank, each in enumerate((first, second, third)))) == (
        "circle",
        (0, 1, 2),
    )


@pytest.mark.parametrize("other", [(WORLD, "all_gather", 8), (WORLD, "all_reduce", 16)])
def test_the_rank_with_another_collective_is_named(other):
    ranks = [flight(rank, REDUCE, other if rank == 1 else REDUCE, waits=True) for rank in range(3)]
    assert hang(*ranks) == ("different", (1,))


def test_a_message_that_nobody_sends():
    message = Channel((1, 0), messages=True)
    assert hang(flight(0, (message, "recv", 8), waits=True), flight(1, REDUCE)) == ("behind", (1,))


def test_devices_whose_hosts_wait_in_no_collective():
    assert hang(flight(0, REDUCE, REDUCE), flight(1, REDUCE, REDUCE), flight(2, REDUCE)) == ("behind", (2,))
    assert hang(flight(0, REDUCE), flight(1, REDUCE)) == ("unknown", (0, 1))
