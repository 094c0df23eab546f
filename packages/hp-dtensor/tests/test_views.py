"""Views: the reshaped part is the part of the reshaped."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor.layout.placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import local_shape, take
from hp_dtensor.rules.planning import view_placements

R = Replicate()


@st.composite
def shapes(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5, 6]), min_size=0, max_size=4))
    if draw(st.integers(0, 9)) == 0:
        factors.append(0)

    def grouped() -> tuple[int, ...]:
        made: list[int] = []
        for factor in factors:
            if made and draw(st.booleans()):
                made[-1] *= factor
            else:
                made.append(factor)
            if draw(st.integers(0, 4)) == 0:
                made.append(1)
        return tuple(made)

    return grouped(), grouped()


@st.composite
def placed(draw) -> tuple:
    shape, result = draw(shapes())
    mesh_shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]))
    found: list = []
    for _ in mesh_shape:
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "strided", "partial"]))
        if kind == "partial":
            found.append(Partial())
        elif kind == "replicate" or not shape:
            found.append(R)
        else:
            dim = draw(st.integers(0, len(shape) - 1))
            factor = draw(st.sampled_from([2, 3]))
            found.append(StridedShard(dim, factor) if kind == "strided" else Shard(dim))
    return shape, result, tuple(found), mesh_shape


def _check(shape: tuple, result: tuple, operand: tuple, out: tuple, mesh_shape: tuple) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    for coordinate in product(*map(range, mesh_shape)):
        part = take(whole, operand, mesh_shape, coordinate)
        wanted = take(whole.reshape(result), out, mesh_shape, coordinate)
        assert part.size == wanted.size, (operand, out, coordinate)
        assert np.array_equal(part.reshape(wanted.shape), wanted), (operand, out, coordinate)


@settings(deadline=None)
@given(placed())
def test_the_reshaped_part_is_the_part_of_the_reshaped(case: tuple) -> None:
    shape, result, placements, mesh_shape = case
    try:
        for coordinate in product(*map(range, mesh_shape)):
            local_shape(shape, placements, mesh_shape, coordinate)
    except ValueError:  # a split_factor that does not divide what is left: there is no such tensor
        return
    operand, out = view_placements(shape, result, placements, mesh_shape)
    assert all(new == old or new == R for new, old in zip(operand, placements)), "an operand may only be gathered"
    _check(shape, result, operand, out, mesh_shape)


@pytest.mark.parametrize(
    ("shape", "result", "placement", "ranks", "out"),
    [
        ((2, 5, 12), (2, 5, 6, 2), Shard(2), 2, Shard(2)),  # heads out of features
        ((2, 5, 6, 2), (2, 5, 12), Shard(2), 3, Shard(2)),  # and back
        ((4, 6), (24,), Shard(0), 2, Shard(0)),
        ((4, 6), (24,), Shard(0), 3, None),  # uneven rows, then 2, 2, 0 rows of 6: not chunks of 24
        ((4, 6), (24,), Shard(1), 2, StridedShard(0, 4)),
        ((24,), (4, 6), Shard(0), 4, Shard(0)),
        ((24,), (4, 6), StridedShard(0, 4), 2, Shard(1)),
        ((5, 7), (5, 7, 1), Shard(1), 2, Shard(1)),
        ((5, 7), (1, 5, 7), Shard(0), 3, Shard(1)),
        ((5, 1, 7), (5, 7), Shard(2), 2, Shard(1)),
        ((5, 7), (35,), Shard(0), 2, None),
        ((4, 6), (4, 2, 3), Shard(1), 3, None),
        ((2, 6, 5), (12, 5), Shard(1), 3, StridedShard(0, 2)),
        ((4, 6), (2, 12), Partial(), 2, Partial()),
        ((1, 4), (4,), Shard(1), 2, Shard(0)),
        ((0, 6), (0, 2, 3), Shard(1), 2, None),
    ],
)
def test_what_a_view_keeps(shape, result, placement, ranks, out) -> None:
    expected = ((placement,), (out,)) if out is not None else ((R,), (R,))
    assert view_placements(shape, result, (placement,), (ranks,)) == expected
    _check(shape, result, *expected, (ranks,))


def test_two_axes() -> None:
    keep = (Shard(0), Shard(2))
    assert view_placements((4, 3, 8), (4, 3, 4, 2), keep, (2, 4)) == (keep, keep)
    both = (Shard(0), Shard(0))
    assert view_placements((8, 3), (8, 3, 1), both, (2, 4)) == (both, both)
    # two cuts that would meet in one dim: the one that stays where it is wins
    assert view_placements((4, 6), (24,), (Shard(0), Shard(1)), (2, 2)) == ((Shard(0), R), (Shard(0), R))


def test_a_ragged_run_of_everything_stays_one() -> None:
    ragged = RaggedShard((0, 1), (5, 7))
    assert view_placements((4, 3), (2, 6), (ragged,), (2,)) == ((ragged,), (ragged,))
    assert view_placements((4, 3), (12,), (ragged,), (2,)) == ((ragged,), (RaggedShard((0,), (5, 7)),))
    owned = RaggedShard((0, 1), (1, 2), owners=(1, 0, 1))
    flat = RaggedShard((0,), (1, 2), owners=(1, 0, 1))
    assert view_placements((4, 3), (12,), (owned,), (2,)) == ((owned,), (flat,))
    rows = RaggedShard((0,), (1, 3))
    assert view_placements((4, 3), (12,), (rows,), (2,)) == ((R,), (R,))
