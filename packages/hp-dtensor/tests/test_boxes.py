"""The boxes of a rank's part: against `sharding.take`, which cuts numpy arrays."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest

from hp_dtensor import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.boxes import boxes, range_boxes
from hp_dtensor.layout.sharding import take

CASES = [
    ((3, 4), (RaggedShard((0, 1), (5, 7)),), (2,)),
    ((5, 3, 4), (RaggedShard((0, 1, 2), (7, 0, 41, 12)),), (4,)),
    ((5, 3, 4), (Replicate(), RaggedShard((1, 2), (5, 7))), (2, 2)),
    ((5, 6), (RaggedShard((0, 1), (2, 1)), Shard(1)), (2, 2)),
    ((5, 3, 4), (Shard(2), RaggedShard((0,), (2, 0, 3), owners=(2, 0, 2, 2, 0))), (2, 3)),
    ((8, 3), (RaggedShard((0, 1), (5, 7)), StridedShard(0, 2)), (2, 2)),
    ((5, 7), (Shard(0), Shard(1)), (4, 2)),
    ((12,), (StridedShard(0, 3), Shard(0)), (2, 2)),
    ((7,), (Shard(0),), (8,)),
    ((), (RaggedShard((), (0, 1)),), (2,)),
    ((), (Replicate(),), (2,)),
]


@pytest.mark.parametrize(("shape", "placements", "mesh"), CASES)
def test_boxes_hold_what_the_rank_holds(shape, placements, mesh):
    whole = np.arange(prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        found = boxes(shape, placements, mesh, coordinate)
        inside = [whole[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes))].reshape(-1) for b in found]
        expected = take(whole, placements, mesh, coordinate).reshape(-1)
        assert all(len(piece) for piece in inside)
        local = take(whole, placements, mesh, coordinate)
        for box, piece in zip(found, inside, strict=True):
            block = local
            if box.ragged is not None:
                dim, start, sizes = box.ragged
                block = np.take(local, range(start, start + prod(sizes)), axis=dim)
                block = block.reshape(local.shape[:dim] + sizes + local.shape[dim + 1 :])
            there = block[tuple(slice(at, at + size) for at, size in zip(box.at, box.sizes, strict=True))]
            assert there.reshape(-1).tolist() == piece.tolist()
        assert sorted(np.concatenate([*inside, np.arange(0)])) == sorted(expected)


def test_a_run_of_a_matrix_is_three_boxes_at_most():
    for start, stop in itertools.combinations(range(13), 2):
        found = list(range_boxes((3, 4), start, stop))
        assert len(found) <= 3
        cells = [4 * i + j for (r, c), (h, w) in found for i in range(r, r + h) for j in range(c, c + w)]
        assert cells == list(range(start, stop))


def test_no_elements_are_one_box_and_a_partial_is_refused():
    (box,) = boxes((0, 3), (Shard(1),), (2,), (1,))
    assert (box.offsets, box.sizes) == ((0, 0), (0, 3))
    with pytest.raises(ValueError, match="has a Partial.*reduce_partial"):
        boxes((2,), (Partial(),), (2,), (0,))
