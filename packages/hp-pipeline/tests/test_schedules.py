"""Every schedule is whole and free of deadlock at any size; bubbles and memory are those of the papers."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from hp_pipeline import Costs, MetaStep, MetaStepType, Pipeline, check, placed, schedules, simulate
from hp_pipeline.orders.greedy import greedy

SCHEDULES = {
    "gpipe": (schedules.gpipe, "line"),
    "looped_bfs": (schedules.looped_bfs, "loop"),
    "1f1b": (schedules.one_f_one_b, "line"),
    "interleaved": (schedules.interleaved, "loop"),
    "interleaved overlapped": (functools.partial(schedules.interleaved, overlap=True), "loop"),
    "interleaved in halves": (functools.partial(schedules.interleaved, overlap=True, split=True), "loop"),
    "interleaved_zb": (schedules.interleaved_zb, "loop"),
    "zb1p": (schedules.zb1p, "line"),
    "zb2p": (schedules.zb2p, "line"),
    "zbv": (schedules.zbv, "v"),
    "v_half": (schedules.v_half, "v"),
    "v_min": (schedules.v_min, "v"),
    "hanayo": (schedules.hanayo, "w"),
    "dual_pipe_v": (schedules.dual_pipe_v, "v"),
}


def test_every_schedule_is_listed():
    listed = {schedule for schedule, _ in SCHEDULES.values()}
    others = {schedules.forwards_of, schedules.from_phases, schedules.is_placed, schedules.synthesize}
    assert {getattr(schedules, name) for name in schedules.__all__} - others <= listed


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_runs_to_its_end(name):
    schedule, shape = SCHEDULES[name]
    for ranks in range(1, 5):
        for micro_batches in range(1, 2 * ranks + 2):
            pipeline = Pipeline(placed(shape, ranks), micro_batches)
            peaks = check(schedule(pipeline), pipeline)
            assert len(peaks) == ranks


def measured(schedule, shape, cost=None, ranks=8):
    """Simulate with 4 micro-batches a rank; return the bubble and the peak in units of a rank and micro-batch."""
    pipeline = Pipeline(placed(shape, ranks), 4 * ranks, cost=cost or Costs())
    order = schedule(pipeline)
    check(order, pipeline)
    trace = simulate(order, pipeline)
    chunks = len(pipeline.placement) // ranks
    return trace.bubble / chunks, max(trace.peaks) / chunks


def test_bubbles_and_memory_are_those_of_the_formulas():
    # P = 8, forward, input and weight one second each; 1F1B's bubble is 3 (P - 1) = 21.
    assert measured(schedules.gpipe, "line") == (21, 32)
    assert measured(schedules.one_f_one_b, "line") == (21, 8)
    assert measured(schedules.interleaved, "loop") == (10.5, 11.5)
    assert measured(schedules.interleaved_zb, "loop") == (3.5, 8)
    assert measured(schedules.zb1p, "line") == (7, 8)
    assert measured(schedules.zb2p, "line")[1] == 16
    assert measured(schedules.zbv, "v") == (3.5, 8)
    assert measured(schedules.v_half, "v") == (9.5, 5)
    assert measured(schedules.v_min, "v") == (13.5, 4)
    assert measured(schedules.hanayo, "w")[0] <= 1.75


def test_bubbles_of_four_ranks():
    measure = functools.partial(measured, ranks=4)
    assert [measure(schedule, "line")[0] for schedule in (schedules.gpipe, schedules.one_f_one_b)] == [9, 9]
    assert measure(schedules.zb1p, "line")[0] == 3
    assert [measure(schedule, "loop")[0] for schedule in (schedules.interleaved, schedules.interleaved_zb)] == [
        4.5,
        1.5,
    ]
    assert measure(schedules.zbv, "v")[0] == 1.5


def test_zb1p_waits_for_the_first_forwards_and_what_inputs_cost_more_than_weights():
    cost = Costs(forward=1.0, input=1.5, weight=1.0)
    assert measured(schedules.zb1p, "line", cost)[0] == pytest.approx(7 * (1 + 1.5 - 1))


def test_zb2p_never_waits_between_its_first_step_and_its_last():
    pipeline = Pipeline(placed("line", 4), 16)
    trace = simulate(schedules.zb2p(pipeline), pipeline)
    for spans, busy in zip(trace.spans, trace.busy, strict=True):
        assert spans[-1].end - spans[0].start == busy


def test_slices_of_the_sequence_hold_less():
    whole = Pipeline(placed("line", 4), 8, cost=Costs(saved=4.0))
    sliced = dataclasses.replace(whole, seq_slices=4, cost=Costs(saved=1.0))
    order = schedules.seq_pp(sliced)
    assert max(check(order, sliced)) == 4 + 3 and max(check(schedules.one_f_one_b(whole), whole)) == 16
    first = [step for step in order[3] if step.micro_index == 0]
    assert [step.seq_index for step in first] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_overlapped_steps_are_pairs_of_a_backward_and_the_forward_after_it():
    pipeline = Pipeline(placed("loop", 2), 4)
    steps = schedules.interleaved(pipeline, overlap=True)[1]
    kinds = [step.step_type for step in steps]
    start = kinds.index(MetaStepType.OVERLAP_B_F)
    assert {*kinds[:start]} == {MetaStepType.FORWARD}
    assert {*kinds[start:]} == {MetaStepType.OVERLAP_B_F, MetaStepType.BACKWARD}
    assert steps[start].sub_steps == (
        MetaStep(0, MetaStepType.BACKWARD, 3),
        MetaStep(1, MetaStepType.FORWARD, 3),
    )


def test_forwards_alone():
    for shape, names in {
        "line": ("gpipe", "one_f_one_b", "zb1p", "zb2p"),
        "loop": ("gpipe", "looped_bfs", "interleaved", "interleaved_zb"),
        "v": ("zbv", "v_half", "v_min", "dual_pipe_v"),
        "w": ("hanayo",),
    }.items():
        pipeline = Pipeline(placed(shape, 3, 2 if shape == "loop" else None), 7, has_backward=False)
        for name in names:
            order = schedules.forwards_of(getattr(schedules, name), pipeline)
            assert {step.step_type for steps in order.values() for step in steps} == {MetaStepType.FORWARD}, name
            assert check(order, pipeline) == (0,) * len(pipeline.stages), name


def test_a_placement_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"ZBV needs stages placed as placed\('v', 2\), got \(0, 1\)"):
        schedules.zbv(Pipeline(placed("line", 2), 4))
    with pytest.raises(ValueError, match=r"interleaved 1F1B needs stages placed as placed\('loop', 2\)"):
        schedules.interleaved(Pipeline((0, 1, 1, 0), 4))
    with pytest.raises(ValueError, match=r"placed: shape is one of \['line', 'loop', 'v', 'w'\], got 'u'"):
        placed("u", 2)
    with pytest.raises(ValueError, match="placed: 'v' on 2 ranks has 2 stages a rank, got chunks=3"):
        placed("v", 2, 3)
    assert placed("v", 2, 2) == placed("v", 2) == (0, 1, 1, 0)
    for make, shape in ((schedules.zbv, "v"), (schedules.interleaved, "loop")):
        pipeline = Pipeline(placed(shape, 2), 4)
        check(make(pipeline), pipeline)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("X0", "rank 0: 'X0' in 'X0' is not a step; a step is F, B, I or W and the number of one of the rank's own"),
        ("F B0", "rank 0: 'F' in 'F B0' is not a step"),
        ("F0B0", "rank 0: 'F0B0' in 'F0B0' is not a step"),
        ("F0+B0+W0", "rank 0: 'F0\\+B0\\+W0' in .* is not a step"),
        ("F0 F1", "rank 0: 'F1' in 'F0 F1' names the rank's own stage 1, but it has one stage, numbered from 0"),
    ],
)
def test_a_phase_that_is_no_step_is_named(pattern, text):
    with pytest.raises(ValueError, match=text):
        schedules.from_phases(Pipeline(placed("line", 2), 4), lambda rank: [(4, pattern)])
    pipeline = Pipeline(placed("line", 2), 4)
    check(schedules.from_phases(pipeline, lambda rank: [(4, "F0"), (4, "B0")]), pipeline)
    check(schedules.from_phases(pipeline, lambda rank: [(2 - rank, "F0"), (2 + rank, "B0+F0"), (2, "B0")]), pipeline)


def test_a_limit_below_one_micro_batch_is_refused():
    pipeline = Pipeline(placed("v", 2), 4)
    with pytest.raises(ValueError, match="a limit of 1 open forwards; one micro-batch alone needs 2 on a rank"):
        greedy(pipeline, 1)
    assert max(check(greedy(pipeline, 2), pipeline)) == 2
