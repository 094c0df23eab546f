"""Peaks and counts of plans that were not traced, from invented traces of some that were."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plan.dry.trace import Trace
from hp_plan.tuning.curves import Curve, Growth, NotLinear, OperationsDiffer, Point, Tally, Undetermined, extended

GRID = [Point(b, s) for b in (2, 3, 5) for s in (64, 128, 256)]


def trace_of(live):
    live = tuple(map(int, live))
    return Trace(live, max(live), 0, len(live), {}, {}, len(live))


def polynomials(point, coefficients):
    b, s = point.micro_batch, point.length
    return trace_of(
        [
            np.dot((1, b * s, s, b, b * s * s, s * s), row) + 840 * index / point.shards
            for index, row in enumerate(coefficients)
        ]
    )


COEFFICIENTS = st.lists(
    st.tuples(st.integers(0, 10**10), *[st.integers(0, 4000)] * 5).map(lambda row: (*row[:4], row[4] % 9, row[5] % 9)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(COEFFICIENTS, st.integers(2, 64), st.integers(16, 8192))
def test_a_peak_is_predicted_to_the_byte(coefficients, b, s):
    curve = Curve.fit(GRID, [polynomials(point, coefficients) for point in GRID])
    assert curve.misfit < 0.5
    far = Point(b, s)
    assert curve.peak(far) == polynomials(far, coefficients).peak


def test_another_operation_has_the_peak_where_the_batch_is_large():
    weights, activations = (10**6, 0, 0, 0, 0, 0), (0, 100, 0, 0, 0, 0)
    curve = Curve.fit(GRID, [polynomials(point, [weights, activations]) for point in GRID])
    assert curve.peak(Point(2, 64)) == 10**6 + 0
    assert curve.peak(Point(64, 1024)) == 100 * 64 * 1024 + 840
    assert curve.peak(Point(np.array([2, 64]), np.array([64, 1024]))).tolist() == [10**6, 100 * 64 * 1024 + 840]


def test_shards_divide_what_they_share():
    rows = [(5, 1, 0, 0, 0, 0), (7, 2, 0, 0, 0, 0)]
    points = [Point(2, 64, 2), Point(3, 64, 2), Point(2, 64, 4)]
    curve = Curve.fit(points, [polynomials(point, rows) for point in points])
    for far in (Point(8, 64, 8), Point(1, 64, 840)):
        assert curve.peak(far) == polynomials(far, rows).peak
    with pytest.raises(Undetermined, match="do not vary what is asked for"):
        curve.peak(Point(2, 128, 2))
    with pytest.raises(Undetermined):
        Curve.fit(points[:2], [polynomials(point, rows) for point in points[:2]]).peak(Point(2, 64, 8))


def test_different_operations_are_refused():
    with pytest.raises(OperationsDiffer, match=r"1 operations at 1 x 2 samples .*, but 2 at 1 x 3 samples"):
        Curve.fit([Point(2, 64), Point(3, 64)], [trace_of([1]), trace_of([1, 2])])


def block_trace(point, *, extra=0):
    """Every block keeps something for each micro-batch in flight; weights are shared."""
    blocks, stages = point.blocks, point.stages
    kept = [
        10**6 * blocks // point.shards + stages * point.micro_batch * point.length * 6 * (i + 1) for i in range(blocks)
    ]
    return trace_of([*kept, kept[-1] + 1000 + extra])


def test_peaks_grow_evenly_over_blocks_and_stages():
    def curve(blocks, stages):
        points = [Point(b, 64, n, 1, blocks, stages) for b, n in ((2, 2), (3, 2), (2, 4))]
        return Curve.fit(points, [block_trace(point) for point in points])

    growth = Growth({at: curve(*at) for at in itertools.product((3, 4), (2, 3))})
    far = Point(7, 64, 8, 1, 32, 16)
    assert growth.peak(far) == block_trace(far).peak
    check = Point(5, 64, 4, 1, 5, 4)
    growth.check(check, block_trace(check))
    with pytest.raises(NotLinear, match=r"the peak, in bytes, at 5 blocks and 4 stages is .*ModelSizes.period"):
        growth.check(check, block_trace(check, extra=10**5))
    assert extended({(3, 1): 70, (4, 1): 90}, 32) == 650


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=8, max_size=8))
def test_counts_grow_with_micro_batches_blocks_and_shards(numbers):
    def counts(point):
        each = numbers[0] + numbers[1] * point.micro_batch * point.length + numbers[2] / point.shards
        once = numbers[3] + numbers[4] / point.shards
        flops = each * point.micro_batches * (1 + numbers[5] * point.blocks) + once * (
            numbers[6] + numbers[7] * point.blocks
        )
        return {"flops": flops, ("bytes", "tp"): 2 * flops * 2**20}

    points = [
        Point(b, 64, n, m, blocks)
        for blocks in (3, 4)
        for b, n, m in ((2, 2, 1), (3, 2, 1), (2, 4, 1), (2, 2, 2), (2, 4, 2))
    ]
    tally = Tally.fit(points, [counts(point) for point in points])
    far = Point(8, 64, 16, 12, 32)
    assert tally.at(far)["flops"] == pytest.approx(counts(far)["flops"], rel=1e-6)
    assert tally.at(far)["bytes", "tp"] == pytest.approx(2**21 * counts(far)["flops"], rel=1e-6)
    tally.check(far, counts(far))
    with pytest.raises(NotLinear, match="bytes tp at 32 blocks"):
        tally.check(far, {**counts(far), ("bytes", "tp"): 0.0})


def test_the_loss_and_the_last_gradient_grow_at_paces_of_their_own():
    def trace(point):
        blocks, tokens = point.blocks, point.micro_batch * point.length
        forward = [10**6 * blocks + tokens * 10 * block for block in range(1, blocks + 1)]
        loss = [forward[-1] + tokens * 2000]
        backward = [10**6 * blocks + 4 * 10**6 * block for block in range(1, blocks + 1) for _ in range(3)]
        live = [*forward, *loss, *backward, 10**6 * blocks]
        return Trace(tuple(live), max(live), 0, len(live), {}, {}, len(live) - 1)

    def curve(blocks):
        points = [Point(b, 64, 1, 1, blocks) for b in (2, 3)]
        return Curve.fit(points, [trace(point) for point in points])

    growth = Growth({(blocks, 1): curve(blocks) for blocks in (3, 4)})
    assert growth.last_block == 3
    for far in (Point(9, 64, 1, 1, 4), Point(200, 64, 1, 1, 4), Point(200, 64, 1, 1, 100), Point(2, 64, 1, 1, 100)):
        assert growth.peak(far) == trace(far).peak
