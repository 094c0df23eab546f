from __future__ import annotations

import doctest

import pytest

from hp_platform import get_platform
from hp_platform.communication import topology
from hp_platform.extend import hosts_of, level, level_of
from hp_testing import on_ranks


def test_examples():
    assert doctest.testmod(topology) == (0, doctest.testmod(topology).attempted)


def test_hosts_are_those_that_ranks_name():
    assert hosts_of(["b", "a", "b", "c"]) == ((0, 2), (1,), (3,))


def test_level_refuses_strangers():
    assert level((1,), ((0, 1),)) == "host"
    with pytest.raises(ValueError, match=r"ranks \[4\] are on none of the hosts"):
        level((0, 4), ((0, 1),))


@on_ranks(2)
def test_ranks_of_this_machine_are_on_one_host():
    ranks = get_platform().groups.ranks()
    assert level_of(ranks) == (None if get_platform().name == "mindspore" else "host")
    assert level_of(ranks[:1]) == "host"
