"""Redistribution plans, run on numpy arrays for all ranks in one process."""

from __future__ import annotations

import re
import time
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor.layout.placements import PARTIAL_OPS, Partial, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.layout.sharding import local_shape, take
from hp_dtensor.redistribution import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Slice,
    ToPartial,
    cost,
    explain,
    plan,
    planner,
    simulate,
)
from hp_dtensor.redistribution.executor import coordinates, reduce_arrays
from hp_dtensor.redistribution.steps import step_cost

R = Replicate()


def _reduced(locals_: dict, placements: tuple, mesh_shape: tuple) -> np.ndarray:
    """The value that whole arrays on all ranks stand for: reduced from the right axis to the left one."""
    held = dict(locals_)
    for axis in reversed(range(len(mesh_shape))):
        placement = placements[axis]
        groups: dict = {}
        for coordinate, array in held.items():
            groups.setdefault(coordinate[:axis], []).append(array)
        held = {
            key: reduce_arrays(arrays, placement.op) if isinstance(placement, Partial) else arrays[0]
            for key, arrays in groups.items()
        }
    return held[()]


@st.composite
def _mesh_shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, max(number, 1) + 1) if number % d == 0]


@st.composite
def _placements(draw: st.DrawFn, shape: tuple[int, ...], mesh_shape: tuple[int, ...], ops: tuple[str, ...]):
    """Any placements that fit: split factors and units are chosen from what the axes before leave."""
    kinds = ["replicate", "partial"] + ["shard", "shard", "strided"] * bool(shape)
    found: list = []
    ragged_axis = draw(st.integers(0, len(mesh_shape) - 1)) if shape and draw(st.integers(0, 3)) == 0 else None
    for axis in range(len(mesh_shape)):
        kind = draw(st.sampled_from(kinds))
        if axis == ragged_axis or kind == "replicate":
            found.append(R)
        elif kind == "partial":
            found.append(Partial(draw(st.sampled_from(ops))))
        elif kind == "shard":
            found.append(Shard(draw(st.integers(0, len(shape) - 1))))
        else:
            dim = draw(st.integers(0, len(shape) - 1))
            sizes = _sizes(shape, found, mesh_shape, dim)
            factor = draw(st.sampled_from(_divisors(int(np.gcd.reduce(list(sizes))) or 1)))
            found.append(StridedShard(dim, factor))
    if ragged_axis is not None:
        first = draw(st.integers(0, len(shape) - 1))
        dims = tuple(range(first, draw(st.integers(first, len(shape) - 1)) + 1))
        runs = {prod(local_shape(shape, found, mesh_shape, c)[d] for d in dims) for c in coordinates(mesh_shape)}
        found[ragged_axis] = draw(_ragged(dims, int(np.gcd.reduce(list(runs))), mesh_shape[ragged_axis]))
    return tuple(found)


@st.composite
def _ragged(draw: st.DrawFn, dims: tuple[int, ...], run: int, n: int) -> RaggedShard:
    total = draw(st.sampled_from(_divisors(run)))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1)))
    units = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    owners = [rank for rank, count in enumerate(units) for _ in range(count)]
    return RaggedShard(dims, units, tuple(draw(st.permutations(owners))) if draw(st.booleans()) else ())


def _sizes(shape: tuple[int, ...], placements: list, mesh_shape: tuple[int, ...], dim: int) -> set[int]:
    known = (*placements, *[R] * (len(mesh_shape) - len(placements)))
    return {local_shape(shape, known, mesh_shape, c)[dim] for c in coordinates(mesh_shape)}


@st.composite
def _problems(draw: st.DrawFn):
    mesh_shape = draw(_mesh_shapes())
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    ops = PARTIAL_OPS if draw(st.booleans()) else (draw(st.sampled_from(PARTIAL_OPS)),)
    return (
        mesh_shape,
        shape,
        draw(_placements(shape, mesh_shape, ops)),
        draw(_placements(shape, mesh_shape, ops)),
        draw(st.integers(0, 2**31)),
    )


def _naive(placements: tuple, target: tuple, shape: tuple, mesh_shape: tuple) -> int:
    """Bytes of gathering everything, then cutting."""
    everything = (R,) * len(mesh_shape)
    total, state = 0, placements
    order = sorted(range(len(mesh_shape)), key=lambda a: (not isinstance(placements[a], RaggedShard), -a))
    for axis in order:
        after = (*state[:axis], R, *state[axis + 1 :])
        if not isinstance(state[axis], Replicate):
            kind = AllReduce if isinstance(state[axis], Partial) else AllGather
            total += 4 * step_cost(kind(axis, state, after), shape, mesh_shape)
        state = after
    assert state == everything
    return total


@settings(deadline=None)
@given(_problems())
def test_every_rank_ends_with_its_part(problem) -> None:
    mesh_shape, shape, src, dst, seed = problem
    random = np.random.default_rng(seed)
    # Small powers of two: sums, products and averages over 2, 4, 8, ... ranks are exact in float64.
    values = {c: random.choice([1.0, 2.0, 0.5, -1.0], size=shape) for c in coordinates(mesh_shape)}
    for coordinate in values:
        shared = tuple(i if isinstance(p, Partial) else 0 for i, p in zip(coordinate, src, strict=True))
        values[coordinate] = values[shared]
    truth = _reduced(values, src, mesh_shape)

    steps = plan(src, dst, shape, mesh_shape)
    locals_ = {c: take(values[c], src, mesh_shape, c) for c in values}
    after = simulate(steps, locals_, shape, mesh_shape)

    for coordinate, array in after.items():
        assert array.shape == local_shape(shape, dst, mesh_shape, coordinate)
        # The ranks of a Partial axis hold parts of one value: what they stand for together is compared.
        axes = [a for a, p in enumerate(dst) if isinstance(p, Partial)]
        line = {
            tuple(i if a in axes else 0 for a, i in enumerate(other)): after[other]
            for other in after
            if all(o == c for a, (o, c) in enumerate(zip(other, coordinate, strict=True)) if a not in axes)
        }
        stands_for = _reduced(line, dst, mesh_shape)
        np.testing.assert_allclose(stands_for, take(truth, dst, mesh_shape, coordinate), rtol=1e-12, atol=1e-12)
    if src != dst:
        assert cost(src, dst, shape, mesh_shape) <= _naive(src, dst, shape, mesh_shape)


@settings(deadline=None)
@given(_problems())
def test_plans_are_chains_of_single_axis_changes(problem) -> None:
    mesh_shape, shape, src, dst, _ = problem
    steps = plan(src, dst, shape, mesh_shape)
    if steps:
        for a, b in zip(steps, steps[1:], strict=False):
            assert a.after == b.before
    for step in steps:
        assert [i for i, (p, q) in enumerate(zip(step.before, step.after, strict=True)) if p != q] == [step.axis]
        assert step.source != step.target
    assert len({step.before for step in steps}) == len(steps)


ONE_AXIS = [
    (Partial(), R, [AllReduce]),
    (Partial("max"), Shard(0), [ReduceScatter]),
    (Partial(), StridedShard(0, 2), [ReduceScatter]),
    (Shard(0), R, [AllGather]),
    (Shard(0), Shard(1), [AllToAll]),
    (Shard(0), StridedShard(0, 2), [AllToAll]),
    (StridedShard(0, 2), Shard(1), [AllToAll]),
    (R, Shard(1), [Slice]),
    (R, Partial("avg"), [ToPartial]),
    (Shard(0), Partial(), [AllGather, ToPartial]),
    (Partial("max"), Partial(), [AllReduce, ToPartial]),
    (RaggedShard((0, 1), (1, 3)), R, [AllGather]),
    (RaggedShard((0, 1), (1, 1), (1, 0)), Shard(0), [AllToAll]),
    (RaggedShard((0, 1), (1, 3)), RaggedShard((0, 1), (1, 1)), [AllToAll]),
    (RaggedShard((0, 1), (1, 3)), Shard(0), [AllToAll]),
    (RaggedShard((0, 1), (1, 3)), Shard(1), [AllGather, Slice]),
    (Partial(), RaggedShard((0, 1), (1, 1)), [ReduceScatter]),
    (Shard(-1), Shard(1), []),
]


@pytest.mark.parametrize(("source", "target", "kinds"), ONE_AXIS, ids=lambda value: repr(value))
def test_one_axis_plans_are_the_direct_step(source, target, kinds) -> None:
    steps = plan((source,), (target,), (8, 8), (2,))
    assert [type(step) for step in steps] == kinds


def test_same_placements_need_nothing() -> None:
    assert plan((Shard(0), Partial()), (Shard(0), Partial()), (4, 4), (2, 2)) == ()


def test_an_axis_of_one_rank_needs_nothing_unless_ragged() -> None:
    assert plan((Shard(0),), (Partial(),), (4, 4), (1,)) == ()
    assert len(plan((RaggedShard((0, 1), (1,)),), (R,), (4, 4), (1,))) == 1


def test_the_inner_axis_of_a_dim_is_gathered_first() -> None:
    steps = plan((Shard(0), Shard(0)), (R, Shard(0)), (8, 8), (2, 2))
    assert [type(step).__name__ for step in steps] == ["AllToAll", "AllGather", "AllToAll"] or steps[0].axis == 1
    assert all(step.axis == 1 or step.before[1] != Shard(0) for step in steps)


def test_a_sum_over_two_axes_reduces_a_piece() -> None:
    steps = plan((Partial(), Partial()), (R, R), (8, 8), (2, 2))
    assert [type(step) for step in steps] == [ReduceScatter, AllReduce, AllGather]
    assert [type(step) for step in plan((Partial(), Partial()), (R, R), (), (2, 2))] == [AllReduce, AllReduce]


def test_reductions_that_do_not_commute_go_from_right_to_left() -> None:
    steps = plan((Partial("sum"), Partial("max")), (R, R), (), (2, 2))
    assert [step.axis for step in steps] == [1, 0]


def test_ragged_is_undone_before_what_it_applies_to() -> None:
    src = (RaggedShard((0, 1), (1, 1)), Shard(0))
    steps = plan(src, (R, R), (8, 8), (2, 2))
    assert [(type(step), step.axis) for step in steps] == [(AllGather, 0), (AllGather, 1)]


def test_units_of_one_rank_of_an_uneven_axis_are_taken() -> None:
    for units in ((10, 6), (0, 0)):  # tp over 3 ranks leaves 2, 2 and 0 rows of 8
        steps = plan((RaggedShard((0, 1), units), Shard(0)), (R, Shard(0)), (4, 8), (2, 3))
        assert [type(step) for step in steps] == [AllGather]


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        ((Shard(2),), (R,), "dim 2 is out of range for a tensor of shape (4, 6)"),
        ((R,), (Shard(0), R), "2 placements (Shard(0), Replicate()) for a mesh of 1 axes (2,)"),
        ((R,), (StridedShard(0, 3),), "split_factor 3 must divide the size of dim 0, which is 4 there"),
        ((R,), (RaggedShard((0, 1), (5, 2)),), "must be a multiple of sum(units) = 7, got [24]"),
        ((RaggedShard((0, 1), (0, 0)),), (R,), "must be a multiple of sum(units) = 0, got [24]"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers(src, dst, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        plan(src, dst, (4, 6), (2,))


def test_simulate_checks_shapes() -> None:
    steps = plan((Shard(0),), (R,), (4,), (2,))
    with pytest.raises(ValueError, match=re.escape("has shape (3,), expected (2,)")):
        simulate(steps, {(0,): np.zeros(3), (1,): np.zeros(2)}, (4,), (2,))


def test_explain_names_axis_change_and_bytes() -> None:
    text = explain((Shard(0), R), (Shard(1), Shard(0)), (4, 4), (2, 2), axis_names=("dp", "tp"))
    assert text.splitlines() == [
        "AllToAll  dp (2 ranks)  Shard(0) -> Shard(1)     16 bytes",
        "Slice     tp (2 ranks)  Replicate() -> Shard(0)  0 bytes",
        "total 16 bytes per rank",
    ]
    assert explain((R,), (R,), (4,), (2,)) == "nothing to do"


def test_a_one_axis_plan_takes_microseconds() -> None:
    search = planner._plan.__wrapped__
    best = min(_timed(lambda: search((Shard(0),), (Shard(1),), (16, 16), (8,))) for _ in range(20))
    assert best < 1e-3


def _timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
