"""Which part of a tensor each rank holds."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor.layout.placements import Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import assemble, chunk, intervals, local_shape, normalize, parts, take


@settings(deadline=None)
@given(size=st.integers(0, 40), n=st.integers(1, 9))
def test_chunks_are_those_of_torch(size: int, n: int) -> None:
    torch = pytest.importorskip("torch", reason="the arithmetic is compared with torch's own chunks")
    lengths = [len(piece) for piece in torch.arange(size).chunk(n)] if size else []
    lengths += [0] * (n - len(lengths))
    assert [chunk(size, n, i)[1] for i in range(n)] == lengths
    assert [chunk(size, n, i)[0] for i in range(n)] == [sum(lengths[:i]) for i in range(n)]


def test_two_axes_cut_one_dim_left_axis_outer() -> None:
    assert intervals(8, [(Shard(0), 2, 1), (Shard(0), 2, 0)]) == [(4, 2)]
    assert intervals(5, [(Shard(0), 2, 1), (Shard(0), 2, 1)]) == [(4, 1)]
    assert intervals(5, [(Shard(0), 4, 3), (Shard(0), 2, 0)]) == []


def test_strided_shard_takes_a_chunk_of_each_block() -> None:
    assert parts(StridedShard(0, 2), 8, 2) == (((0, 2), (4, 2)), ((2, 2), (6, 2)))
    assert parts(StridedShard(0, 2), 6, 2) == (((0, 2), (3, 2)), ((2, 1), (5, 1)))
    assert parts(StridedShard(0, 1), 6, 4) == parts(Shard(0), 6, 4)


def test_strided_shard_is_what_flattening_leaves_of_an_inner_shard() -> None:
    array = np.arange(24).reshape(3, 8)
    for rank in range(2):
        inner = take(array, (Shard(1),), (2,), (rank,)).reshape(-1)
        assert (take(array.reshape(-1), (StridedShard(0, 3),), (2,), (rank,)) == inner).all()


def test_strided_left_axis_gives_the_right_to_left_order() -> None:
    held = [intervals(8, [(StridedShard(0, 2), 2, a), (Shard(0), 2, b)]) for a in range(2) for b in range(2)]
    assert held == [[(0, 2)], [(4, 2)], [(2, 2)], [(6, 2)]]


def test_cut_of_a_strided_part_maps_back_through_its_blocks() -> None:
    assert intervals(12, [(StridedShard(0, 2), 2, 0), (StridedShard(0, 3), 2, 1)]) == [(1, 1), (6, 1), (8, 1)]


def test_ragged_pieces_are_in_proportion_and_come_after_the_other_axes() -> None:
    placements = (RaggedShard((0, 1), (3, 1, 0)), Shard(0))
    assert [local_shape((4, 4), placements, (3, 2), (i, 1)) for i in range(3)] == [(6,), (2,), (0,)]
    array = np.arange(16).reshape(4, 4)
    assert take(array, placements, (3, 2), (1, 1)).tolist() == [14, 15]


def test_ragged_of_some_dims_keeps_the_others() -> None:
    assert local_shape((2, 3, 5), (RaggedShard((0, 1), (2, 1)),), (2,), (0,)) == (4, 5)
    assert local_shape((2, 3, 4), (RaggedShard((1, 2), (2, 1)),), (2,), (1,)) == (2, 4)
    assert local_shape((), (RaggedShard((), (0, 1)),), (2,), (1,)) == (1,)


@pytest.mark.parametrize(
    ("placements", "shape", "mesh_shape", "text"),
    [
        ((Shard(2),), (4, 4), (2,), "Shard(2): dim 2 is out of range for a tensor of shape (4, 4), which has 2 dims"),
        ((Shard(0),), (), (2,), "a scalar cannot be sharded"),
        ((Shard(0),), (4,), (2, 2), "1 placements (Shard(0),) for a mesh of 2 axes (2, 2)"),
        ((StridedShard(0, 0),), (4,), (2,), "split_factor must be at least 1, got 0"),
        ((RaggedShard((0,), (1, 1, 1)),), (4,), (2,), "pass 2 non-negative units, got 3"),
        ((RaggedShard((0,), (1, -1)),), (4,), (2,), "non-negative"),
        ((RaggedShard((0, 2), (1, 1)),), (4, 2, 2), (2,), "dims must be consecutive and ascending"),
        (
            (RaggedShard((0,), (1, 1), (0, 0)),),
            (4,),
            (2,),
            "owners must list each rank as often as its unit says, got (2, 0) times",
        ),
        ((RaggedShard((0,), (1,)), RaggedShard((0,), (1,))), (4,), (1, 1), "more than one RaggedShard"),
    ],
)
def test_wrong_placements_are_errors_with_numbers(placements, shape, mesh_shape, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        normalize(placements, shape, mesh_shape)


def test_what_does_not_fit_is_an_error_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"split_factor 3 must divide the size 4 that is left of dim 0"):
        local_shape((4,), (StridedShard(0, 3),), (2,), (0,))
    with pytest.raises(ValueError, match=r"have 4 elements here, which must be a multiple of sum\(units\) = 3"):
        local_shape((4,), (RaggedShard((0,), (1, 2)),), (2,), (0,))


def test_negative_dims_count_from_the_end() -> None:
    assert normalize((Shard(-1), StridedShard(-2, 2)), (4, 4), (2, 2)) == (Shard(1), StridedShard(0, 2))
    assert normalize((RaggedShard((-2, -1), (1, 1)),), (4, 4), (2,)) == (RaggedShard((0, 1), (1, 1)),)


def test_assemble_refuses_partial() -> None:
    with pytest.raises(ValueError, match="reduce it first"):
        assemble({(0,): np.zeros(2)}, (Partial(),), (2,), (1,))


@settings(deadline=None)
@given(data=st.data())
def test_assemble_undoes_take(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    mesh_shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    one = st.one_of(st.builds(Shard, st.integers(0, len(shape) - 1)), st.just(Replicate()))
    placements = tuple(data.draw(one) for _ in mesh_shape)
    array = np.arange(int(np.prod(shape))).reshape(shape)
    locals_ = {c: take(array, placements, mesh_shape, c) for c in np.ndindex(*mesh_shape)}
    for coordinate, local in locals_.items():
        assert local.shape == local_shape(shape, placements, mesh_shape, coordinate)
    assert (assemble(locals_, placements, shape, mesh_shape) == array).all()
