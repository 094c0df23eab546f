"""Transfers between meshes, run on numpy arrays for all ranks in one process."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor.layout.placements import PARTIAL_OPS, Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import local_shape, take
from hp_dtensor.layout.spec import Layout
from hp_dtensor.redistribution import AllGather, ReduceScatter, explain_transfer, plan_transfer, simulate
from hp_dtensor.redistribution.executor import coordinates, reduce_arrays

R = Replicate()


def _layout(mesh_shape, ranks, *placements) -> Layout:
    names = tuple("xyz"[: len(mesh_shape)])
    return Layout(mesh_shape, names, tuple(ranks))._placed(placements, None)


def _by_rank(layout: Layout) -> dict[int, tuple[int, ...]]:
    return dict(zip(layout.rank_list, coordinates(layout.mesh_shape), strict=True))


def _stands_for(held: dict[tuple[int, ...], np.ndarray], layout: Layout) -> np.ndarray:
    """The value of whole arrays on all coordinates: reduced from the right axis to the left one."""
    for axis in reversed(range(len(layout.mesh_shape))):
        groups: dict = {}
        for coordinate, array in held.items():
            groups.setdefault(coordinate[:axis], []).append(array)
        placement = layout.placements[axis]
        held = {
            key: reduce_arrays(arrays, placement.op) if isinstance(placement, Partial) else arrays[0]
            for key, arrays in groups.items()
        }
    return held[()]


def _run(way, arrays: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """What each rank of the target mesh holds in the end, from what each of the source mesh holds."""
    source, target = _by_rank(way.source), _by_rank(way.target)
    sent = simulate(way.before, {c: arrays[r] for r, c in source.items()}, way.shape, way.source.mesh_shape)
    received = {}
    for rank, coordinate in target.items():
        shape = local_shape(way.shape, way.received.placements, way.target.mesh_shape, coordinate)
        out = np.full(way.view(way.received, rank), np.nan)
        times = np.zeros(out.shape, int)
        for move in way.moves_to(rank):
            assert move in way.moves_from(move.source), "both ends see one move"
            assert move.elements > 0
            held = sent[source[move.source]].reshape(way.view(way.sent, move.source))
            out[_grid(move.put)] = held[_grid(move.taken)]
            times[_grid(move.put)] += 1
        fill = way.fill(rank)
        assert (times == (fill is None)).all(), "each element comes once, or none where the rank needs no value"
        received[coordinate] = np.full(shape, float(fill)) if fill is not None else out.reshape(shape)
    ended = simulate(way.after, received, way.shape, way.target.mesh_shape)
    return {rank: ended[coordinate] for rank, coordinate in target.items()}


def _grid(box):
    return np.ix_(*[np.concatenate([np.arange(start, start + length) for start, length in run]) for run in box])


# ---- any layout to any other ----
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, max(number, 1) + 1) if number % d == 0]


@st.composite
def _placements(draw, shape, mesh_shape, partial: bool):
    found: list = [R] * len(mesh_shape)
    ragged = draw(st.integers(0, len(mesh_shape) - 1)) if shape and draw(st.integers(0, 2)) == 0 else None
    for axis in range(len(mesh_shape)):
        kind = draw(st.sampled_from(["replicate", "shard", "shard", "strided", "partial"]))
        if axis == ragged:
            continue
        if kind == "partial" and partial:
            found[axis] = Partial(draw(st.sampled_from(PARTIAL_OPS)))
        elif kind in ("shard", "strided") and shape:
            dim = draw(st.integers(0, len(shape) - 1))
            sizes = {local_shape(shape, found, mesh_shape, c)[dim] for c in coordinates(mesh_shape)}
            factor = draw(st.sampled_from(_divisors(int(np.gcd.reduce(list(sizes))) or 1)))
            found[axis] = (
                StridedShard(dim, factor) if kind == "strided" else Shard(dim - len(shape) * draw(st.booleans()))
            )
    if ragged is not None:
        first = draw(st.integers(0, len(shape) - 1))
        dims = tuple(range(first, draw(st.integers(first, len(shape) - 1)) + 1))
        runs = {prod(local_shape(shape, found, mesh_shape, c)[d] for d in dims) for c in coordinates(mesh_shape)}
        if len(runs) == 1:
            total = draw(st.sampled_from(_divisors(runs.pop())))
            n = mesh_shape[ragged]
            cuts = sorted(draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1)))
            units = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
            owners = [rank for rank, count in enumerate(units) for _ in range(count)]
            shuffled = tuple(draw(st.permutations(owners))) if draw(st.booleans()) else ()
            found[ragged] = RaggedShard(dims, units, shuffled)
    return tuple(found)


@st.composite
def _layouts(draw, shape, world: int):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(max(world, prod(mesh_shape)))))
    return _layout(mesh_shape, ranks[: prod(mesh_shape)], *draw(_placements(shape, mesh_shape, draw(st.booleans()))))


@st.composite
def _problems(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    world = draw(st.sampled_from([1, 4, 20, 128]))
    return shape, draw(_layouts(shape, world)), draw(_layouts(shape, world)), draw(st.integers(0, 2**31))


@settings(deadline=None)
@given(_problems())
def test_every_rank_ends_with_its_part(problem) -> None:
    shape, source, target, seed = problem
    random = np.random.default_rng(seed)
    values = {c: random.choice([1.0, 2.0, 0.5, -1.0], size=shape) for c in coordinates(source.mesh_shape)}
    for coordinate in values:
        shared = tuple(i * isinstance(p, Partial) for i, p in zip(coordinate, source.placements, strict=True))
        values[coordinate] = values[shared]
    truth = _stands_for(values, source)
    arrays = {r: take(values[c], source.placements, source.mesh_shape, c) for r, c in _by_rank(source).items()}

    way = plan_transfer(source, target, shape)
    ended = _run(way, arrays)

    places = _by_rank(target)
    partial = [isinstance(p, Partial) for p in target.placements]
    for rank, coordinate in places.items():
        assert ended[rank].shape == local_shape(shape, target.placements, target.mesh_shape, coordinate)
        # The ranks of a Partial axis hold parts of one value: what they stand for together is compared.
        line = {
            tuple(i if some else 0 for i, some in zip(place, partial, strict=True)): ended[other]
            for other, place in places.items()
            if all(i == j for i, j, some in zip(place, coordinate, partial, strict=True) if not some)
        }
        expected = take(truth, target.placements, target.mesh_shape, coordinate)
        np.testing.assert_allclose(_stands_for(line, target), expected, rtol=1e-12)


@settings(deadline=None)
@given(_problems())
def test_the_busiest_rank_is_told_right(problem) -> None:
    shape, source, target, _ = problem
    way = plan_transfer(source, target, shape)
    sent = {r: sum(m.elements for m in way.moves_from(r) if m.destination != r) for r in source.rank_list}
    got = {r: sum(m.elements for m in way.moves_to(r) if m.source != r) for r in target.rank_list}
    assert way.elements == max(*sent.values(), *got.values())
    assert way.sends == (way.elements > 0)
    assert sum(sent.values()) == sum(got.values())


# ---- what is sent ----
def test_a_rank_keeps_what_it_has() -> None:
    whole = _layout((2, 2), range(4), Shard(0), Shard(0))
    assert not plan_transfer(whole, _layout((4,), range(4), Shard(0)), (8, 3)).sends
    row = plan_transfer(_layout((2, 2), range(4), R, Shard(0)), _layout((2,), (0, 1), Shard(0)), (5, 3))
    assert not row.sends and row.ranks == (0, 1, 2, 3)


def test_what_is_sharded_is_sent_once() -> None:
    way = plan_transfer(_layout((4,), range(4), Shard(0)), _layout((3,), (5, 4, 1), Shard(1)), (8, 6))
    moves = [move for rank in range(4) for move in way.moves_from(rank)]
    assert sum(move.elements for move in moves) == 48
    assert [(m.source, m.destination) for m in moves] == [(r, d) for r in range(4) for d in (1, 4, 5)]


def test_replicas_take_turns_in_sending() -> None:
    way = plan_transfer(_layout((4,), range(4), R), _layout((8,), range(4, 12), Shard(0)), (16,))
    assert [sum(move.elements for move in way.moves_from(rank)) for rank in range(4)] == [4, 4, 4, 4]
    both = plan_transfer(_layout((4,), range(4), R), _layout((2,), (4, 5), R), (16,))
    assert [sum(move.elements for move in both.moves_from(rank)) for rank in range(4)] == [16, 16, 0, 0]


def test_a_replicated_target_gathers_what_one_rank_would_send_to_all() -> None:
    way = plan_transfer(_layout((1,), (0,), R), _layout((4,), range(4), R), (16,))
    assert way.received.placements == (Shard(0),) and [type(step) for step in way.after] == [AllGather]
    assert plan_transfer(_layout((1,), (0,), R), _layout((4,), range(4), R), ()).after == (), "a scalar can't be cut"


def test_a_partial_is_reduced_no_further_than_needed() -> None:
    way = plan_transfer(_layout((4,), range(4), Partial()), _layout((4,), range(4, 8), Shard(0)), (16,))
    assert [type(step) for step in way.before] == [ReduceScatter] and way.elements == 4


def test_ranks_that_hold_a_neutral_part_get_nothing() -> None:
    way = plan_transfer(_layout((1,), (0,), R), _layout((2, 2), range(1, 5), Partial("product"), Partial()), (6,))
    assert [way.fill(rank) for rank in range(1, 5)] == [None, 0, 1, 0]
    assert [len(way.moves_to(rank)) for rank in range(1, 5)] == [1, 0, 0, 0]


def test_a_thousand_ranks_are_planned() -> None:
    way = plan_transfer(
        _layout((1024,), range(1024), Shard(0)), _layout((256,), range(1024, 1280), Shard(0)), (4096, 8)
    )
    assert way.elements == 128
    assert [move.source for move in way.moves_to(1025)] == [4, 5, 6, 7]


# ---- errors ----
@pytest.mark.parametrize(
    ("target", "text"),
    [
        ((Shard(2),), "dim 2 is out of range for a tensor of shape (4, 6)"),
        ((R, R), "2 placements"),
        ((StridedShard(1, 4),), "split_factor 4 must divide the size 6"),
        ((RaggedShard((0, 1), (5, 2)),), "must be a multiple of sum(units) = 7"),
    ],
)
def test_what_does_not_fit_is_an_error(target, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        plan_transfer(_layout((2,), (0, 1), R), _layout((2,), (2, 3), *target), (4, 6))


def test_a_layout_of_ranks_only_is_an_error() -> None:
    with pytest.raises(ValueError, match="describes ranks only; call it"):
        plan_transfer(Layout((2,), ("x",)), _layout((2,), (2, 3), R), (4, 6))


def test_units_that_other_ranks_cannot_know_are_an_error() -> None:
    source = _layout((2, 2), range(4), Shard(0), RaggedShard((0, 1), (1, 1)))
    with pytest.raises(ValueError, match=re.escape("shards [6, 12] elements, depending on the rank")):
        plan_transfer(source, _layout((1,), (4,), R), (3, 6))


# ---- text ----
def test_explain_tells_each_leg_with_its_bytes() -> None:
    source = Layout((2, 2), ("dp", "tp"))._placed((Shard(0), Partial()), None)
    target = Layout((2,), ("x",), (4, 5))._placed((Shard(1),), None)
    assert explain_transfer(source, target, (8, 8)).splitlines() == [
        "ReduceScatter  tp (2 ranks)             Partial() -> Shard(1)                64 bytes",
        "Transfer       ranks 0-3 to ranks 4, 5  (Shard(0), Shard(1)) -> (Shard(1),)  128 bytes",
        "total 192 bytes per rank",
    ]
    renamed = Layout((2, 2), ("a", "b"))._placed((R, R), None)
    assert "AllReduce" in explain_transfer(source, renamed, (8, 8)) and "Transfer" not in explain_transfer(
        source, renamed, (8, 8)
    )
    few = explain_transfer(_layout((9,), range(0, 18, 2), Shard(0)), _layout((1,), (1,), R), (9,))
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (9) to rank 1" in few
