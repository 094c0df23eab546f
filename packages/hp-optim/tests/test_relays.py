"""Relays: after two exchanges every rank knows what any of them knew."""

from __future__ import annotations

import pytest

from hp_optim.muon.ownership import Relays


@pytest.mark.parametrize("places", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 17, 64, 90])
def test_all_know_after_two_exchanges(places: int):
    relays = [Relays.of(place, places) for place in range(places)]
    for sender, its in enumerate(relays):
        assert not its.first_to[sender] and not its.second_to[sender]
        for other, theirs in enumerate(relays):
            assert its.first_to[other] == theirs.first_from[sender]
            assert its.second_to[other] == theirs.second_from[sender]
    knows = [{place, *(other for other in range(places) if relays[place].first_from[other])} for place in range(places)]
    for place, its in enumerate(relays):
        heard = [knows[other] for other in range(places) if its.second_from[other]]
        assert knows[place].union(*heard) == set(range(places))


def test_few_messages_among_many_ranks():
    for place in (0, 31, 32, 500, 1023):
        its = Relays.of(place, 1024)
        assert sum(its.first_to) == sum(its.second_to) == 31
