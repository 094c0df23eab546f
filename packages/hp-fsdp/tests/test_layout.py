"""Where parameters lie in the flat buffer: pure arithmetic."""

from __future__ import annotations

import doctest
import random

import pytest

from hp_fsdp.groups import managed_params
from hp_fsdp.groups.managed_params import FlatLayout
from hp_fsdp.steps import order


def test_parameters_lie_one_after_the_other_and_pieces_are_equal():
    made = FlatLayout.of([6, 3], ranks=2, align=4)
    assert (made.offsets, made.piece, made.total) == ((0, 8), 8, 16)
    assert (made.units(0), made.units(1)) == ((6, 0), (0, 3))


@pytest.mark.parametrize("seed", range(12))
def test_each_element_has_one_owner(seed: int):
    rng = random.Random(seed)
    numels = [rng.choice([0, 1, 5, 16, 33, 100]) for _ in range(rng.randint(1, 8))]
    ranks, align = rng.choice([1, 2, 3, 4, 8, 64]), rng.choice([1, 4, 16])
    made = FlatLayout.of(numels, ranks, align=align)
    assert made.piece % align == 0 and made.total >= sum(numels)
    owned = [[0] * numel for numel in numels]
    units = [made.units(index) for index in range(len(numels))]
    for rank in range(ranks):
        sizes, runs = made.splits(rank)
        assert sum(sizes) == made.piece
        for index, run in enumerate(runs):
            start, stop = made.part(index, rank)
            assert units[index][rank] == sizes[run] == stop - start
            place = made.place(index, rank)
            assert place[1] - place[0] == stop - start
            if stop > start:
                assert place[0] == sum(sizes[:run]) and rank * made.piece + place[0] == made.offsets[index] + start
            for element in range(start, stop):
                owned[index][element] += 1
    assert all(count == 1 for counts in owned for count in counts)


def test_a_thousand_ranks_own_a_small_parameter():
    made = FlatLayout.of([10], ranks=1000)
    assert made.piece == 1 and made.units(0) == (1,) * 10 + (0,) * 990


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match=r"ranks and align must be at least 1, got ranks=0, align=1"):
        FlatLayout.of([1], 0)


def test_examples_of_the_docstrings():
    for module in (managed_params, order):
        assert doctest.testmod(module).failed == 0


def test_large_parameters_are_cut_between_blocks():
    layout = FlatLayout.of([10, 5000, 300], ranks=3, align=16, align_large=256)
    assert layout.offsets == (0, 256, 5264) and layout.piece == 2048
    assert layout.units(1) == (1792, 2048, 1160)
    assert FlatLayout.of([10, 300], ranks=3, align=16, align_large=256) == FlatLayout.of([10, 300], ranks=3, align=16)
