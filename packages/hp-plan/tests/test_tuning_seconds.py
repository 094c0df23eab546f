"""Seconds of a step, from invented traces."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hp_pipeline import Costs, Pipeline, placed, simulate
from hp_pipeline.extend import schedules
from hp_plan.dry.trace import Count, Trace
from hp_plan.tuning.hardware import Hardware, counts_of, seconds_of
from hp_plan.tuning.seconds import bubble_share, count_work, price, strides_of, traffic

H100 = dataclasses.replace(Hardware.load("h100-8"), host=0.0)
ALONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
PRODUCT = "aten.mm.default(bfloat16[64,64|64,1], bfloat16[64,64|64,1])"
NORM = "aten.native_layer_norm.default(float32[100,100|100,1])"
ADAM = "aten._foreach_addcmul_.Scalar([float32[100|1], float32[100|1]])"


def trace_of(*, flops=10**12, collectives=None, kernels=None):
    kernels = {PRODUCT: 10, NORM: 4, ADAM: 2} if kernels is None else kernels
    return Trace((1,), 1, flops, sum(kernels.values()), collectives or {}, kernels, 1)


def priced(trace, mesh=None, *, kernels=None, **options):
    return price(count_work(trace, kernels), H100, {**ALONE, **(mesh or {})}, dtype="bfloat16", **options).one()


def test_kernels_go_by_what_bounds_them():
    seconds = priced(trace_of())
    assert traffic(NORM) == 80_000
    assert seconds.compute == pytest.approx(10**12 / 989e12 + 4 * 80_000 / 3.35e12 + 14 * 2e-6)
    assert seconds.optimizer == pytest.approx(2 * 1200 / 3.35e12 + 2 * 2e-6)
    assert (seconds.exposed, seconds.bubble) == ({}, 0)
    assert seconds.total == seconds.compute + seconds.optimizer


def test_measured_kernels_take_their_seconds():
    seconds = priced(trace_of(), kernels={PRODUCT: 1e-3, NORM: 1e-4, ADAM: 1e-5})
    assert seconds.compute == pytest.approx(10 * 1e-3 + 4 * 1e-4)
    assert seconds.optimizer == pytest.approx(2 * 1e-5)
    half = priced(trace_of(), kernels={NORM: 1e-4})
    assert half.compute == pytest.approx(10**12 / 989e12 + 10 * 2e-6 + 4 * 1e-4)


def test_the_host_bounds_small_kernels():
    slow = dataclasses.replace(H100, host=1.0)
    assert price(count_work(trace_of()), slow, ALONE, dtype="bfloat16").one().compute == 16


def test_gathers_hide_behind_compute_and_tensor_parallel_messages_do_not():
    gather, reduce = ("all_gather", 2**30, ("dp_shard",)), ("all_reduce", 2**20, ("tp",))
    mesh = {"dp_shard": 8, "tp": 8}
    few = trace_of(collectives={gather: Count(1, 2**20), reduce: Count(8, 2**23)})
    seconds = priced(few, mesh)
    tp = seconds_of(H100, "all_reduce", 2**23, counts_of(H100, range(8)), calls=8)
    assert seconds.exposed == pytest.approx({"tp": tp})
    many = trace_of(collectives={gather: Count(64, 2**36), reduce: Count(8, 2**23)})
    dp = seconds_of(H100, "all_gather", 2**36, counts_of(H100, range(0, 64, 8)), calls=64)
    assert priced(many, mesh).exposed == pytest.approx({"tp": tp, "dp_shard": dp - seconds.compute})
    assert priced(many, mesh, overlapped=False).exposed == pytest.approx({"tp": tp})


def test_bubbles_are_those_that_a_simulation_finds():
    written = {"1f1b": ("line", schedules.one_f_one_b), "interleaved": ("loop", schedules.interleaved)}
    written["zbv"] = ("v", schedules.zbv)
    for (name, (shape, write)), ranks, times in itertools.product(written.items(), (2, 3, 4, 8), (1, 2, 5)):
        placement = placed(shape, ranks)
        chunks, micros = len(placement) // ranks, times * ranks
        pipeline = Pipeline(placement, micros, cost=Costs(*[1 / 3 / chunks] * 3))
        bubble = simulate(write(pipeline), pipeline).makespan - micros
        assert bubble_share(name, ranks, micros, chunks) == pytest.approx(bubble), (name, ranks, micros)


def test_a_bubble_is_a_share_of_micro_batches():
    reduce = {("all_reduce", 2**20, ("tp",)): Count(8, 2**23)}
    seconds = priced(trace_of(collectives=reduce), {"pp": 4, "tp": 2}, micro_batches=8, schedule="1f1b")
    assert seconds.bubble == pytest.approx(3 / 8 * (seconds.compute + seconds.exposed["tp"]))


def test_axes_have_the_strides_of_the_mesh():
    mesh = {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2, "pp": 3, "ep": 4}
    strides = strides_of(mesh)
    assert strides["tp"] == (1, 2)
    assert strides["dp_shard"] == (4, 4)
    assert strides["pp"] == (32, 3)
    assert (strides["ep"], strides["efsdp"]) == ((1, 4), (4, 4))
    cut = strides_of({**mesh, "tp": 8, "ep": 2})
    assert (cut["ep"], cut["efsdp"]) == ((8, 2), (16, 4))


def test_many_plans_are_priced_as_each_alone_is():
    collectives = {("all_gather", 9, ("dp_shard", "cp")): Count(3, 2**33), ("all_to_all", 9, ("ep",)): Count(2, 2**28)}
    work = count_work(trace_of(collectives=collectives))
    meshes = [{**ALONE, "dp_shard": shard, "cp": 2, "ep": ep} for shard in (2, 8, 64) for ep in (1, 4)]
    together = price(
        {name: np.full(len(meshes), value) for name, value in work.items()},
        H100,
        {axis: np.array([mesh[axis] for mesh in meshes]) for axis in ALONE},
        dtype="bfloat16",
    )
    for index, mesh in enumerate(meshes):
        assert together.one(index).parts == pytest.approx(price(work, H100, mesh, dtype="bfloat16").one().parts)
    slower = together.slower(price(work, H100, meshes[-1], dtype="bfloat16"))
    assert (slower.total >= together.total).all()


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="a group of all_reduce spans 'dq', expected axes among tp, cp"):
        priced(trace_of(collectives={("all_reduce", 1, ("dq",)): Count(1, 1)}))
