"""The largest plan that fits, by an invented peak."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plan import ParallelPlan
from hp_plan.tuning.fitting import NotMonotone, fit
from hp_plan.tuning.space import ModelSizes

MODEL = ModelSizes(layers=8, heads=8, kv_heads=8)
WEIGHTS = 2**20  # of a layer
TOKEN = 2**10


def plan_of(**sections):
    tables = {
        "model": {"config": "LlamaConfig", "overrides": {"num_hidden_layers": 8}},
        "data": {"batch_size": 8, "sequence_length": 64},
        "mesh": {"dp_shard": 2},
    }
    return ParallelPlan.from_dict({**tables, **sections})


def peak(plan):
    layers = plan.model.overrides["num_hidden_layers"]
    parts = plan.mesh.data_parallel * (plan.pipeline.micro_batches if plan.mesh.pp > 1 else plan.run.accumulate)
    samples = plan.data.batch_size // parts
    assert samples * parts == plan.data.batch_size
    tokens = samples * plan.data.sequence_length // plan.mesh.cp
    kept = layers if not plan.memory.recompute else 1
    gathered = 2 if plan.fsdp.reshard_after_forward else layers
    resident = 0 if plan.memory.homes else layers
    return resident * WEIGHTS * 16 // plan.mesh.dp_shard + gathered * WEIGHTS + tokens * TOKEN * kept


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([("micro_batch", 4096), ("sequence_length", 9000), ("layers", 100)]),
    st.integers(0, 2**31),
    st.integers(1, 4),
)
def test_the_answer_fits_and_the_next_does_not(asked, memory, accumulate):
    (quantity, most), calls = asked, []
    plan = plan_of(run={"accumulate": accumulate}, data={"batch_size": 8 * accumulate, "sequence_length": 64})

    def counted(each):
        calls.append(each)
        return peak(each)

    found = fit(plan, counted, memory, quantity=quantity, most=most, model=MODEL)
    assert found.peak == peak(found.plan)
    if found.value is None:
        assert found.peak > memory
        assert found.excess == found.peak - memory
    else:
        assert found.peak <= memory
        if found.beyond is None:
            assert found.value == most - most % 2 if quantity == "sequence_length" else found.value == most
        else:
            assert found.beyond[1] > memory
            assert found.beyond[0] == found.value + (2 if quantity == "sequence_length" else 1)
    assert len(calls) < 22


def test_quantities_are_written_into_the_plan():
    room = 2**28
    samples = fit(plan_of(run={"accumulate": 2}), peak, room)
    assert samples.value == samples.plan.data.batch_size // 4
    length = fit(plan_of(mesh={"dp_shard": 2, "cp": 2}), peak, room, quantity="sequence_length", most=10**6)
    assert length.value == length.plan.data.sequence_length
    assert length.value % 4 == 0
    layers = fit(plan_of(), peak, room, quantity="layers", model=MODEL)
    assert layers.value == layers.plan.model.overrides["num_hidden_layers"]
    for pipeline in ({"micro_batches": 4}, {}):  # the default is one for each sample of a rank
        staged = fit(plan_of(mesh={"dp_shard": 2, "pp": 2}, pipeline=pipeline), peak, room)
        assert staged.plan.pipeline.micro_batches == 4
        assert staged.value == staged.plan.data.batch_size // 8


def test_a_fit_is_a_sentence():
    room = peak(plan_of(data={"batch_size": 6, "sequence_length": 64}))
    found = fit(plan_of(), peak, room)
    assert str(found) == "3 samples a micro-batch fit: 67.5 MiB of 67.5 MiB; 4 take 68 MiB"
    all_fit = fit(plan_of(), peak, 2**39, most=64)
    assert str(all_fit) == "64 samples a micro-batch fit: 98 MiB of 512 GiB, and no more were asked for"


def test_where_nothing_fits_single_changes_are_named():
    plan = plan_of(fsdp={"reshard_after_forward": False}, data={"batch_size": 8, "sequence_length": 2**14})
    room = (
        peak(plan_of(fsdp={"reshard_after_forward": False}, data={"batch_size": 2, "sequence_length": 2**14})) - 2**24
    )
    found = fit(plan, peak, room, model=MODEL)
    assert found.value is None
    assert {each.what for each in found.changes} == {
        'memory.recompute = ["model.layers.*"]',
        'memory.homes = {"model.layers.*" = "host"}',
        "mesh.dp_shard = 4, with 2 times the ranks",
    }
    assert all(peak(each.plan) == each.peak <= room for each in found.changes)
    offloaded = dataclasses.replace(plan, fsdp=dataclasses.replace(plan.fsdp, offload=True))
    assert not any("homes" in each.what for each in fit(offloaded, peak, room, model=MODEL).changes)
    text = str(found)
    assert "16 MiB too much; one of these is enough:\n  memory.recompute" in text
    assert str(fit(plan, peak, 10)).endswith(
        "no single change is enough: give more memory, or several of recompute, homes, shards and stages"
    )


def test_smaller_micro_batches_are_a_change():
    plan = plan_of(data={"batch_size": 8, "sequence_length": 2**10})
    room = peak(plan_of(data={"batch_size": 2, "sequence_length": 2**11}))
    found = fit(plan, peak, room, quantity="sequence_length", most=2**12, step=2**11)
    assert found.value is None
    assert "run.accumulate = 4" in {each.what for each in found.changes}


def test_a_peak_that_falls_is_refused():
    def falling(plan):
        samples = plan.data.batch_size // 2
        return 10 if samples > 8 else 100 + samples

    with pytest.raises(NotMonotone, match="fewer bytes than"):
        fit(plan_of(), falling, 5, most=16)
    with pytest.raises(ValueError, match="most is 1, below the step of 2 tokens"):
        fit(plan_of(), peak, 5, quantity="sequence_length", most=1)
    with pytest.raises(ValueError, match="needs model=ModelSizes"):
        fit(plan_of(), peak, 5, quantity="layers")
