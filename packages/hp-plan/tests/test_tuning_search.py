"""The best plans of a space, beside every plan priced one by one, with an invented trace."""

from __future__ import annotations

import dataclasses
import math
import random
import time

import pytest

from hp_plan.dry.trace import Count, Trace
from hp_plan.reading.diagnostics import Diagnostic, PlanError
from hp_plan.tuning.curves import NotLinear
from hp_plan.tuning.hardware import Hardware, Level
from hp_plan.tuning.search import Curves, NothingFits, tune
from hp_plan.tuning.seconds import count_work, price
from hp_plan.tuning.space import MESH, SCHEDULES, ModelSizes, enumerate_plans

WIDTH, VOCABULARY = 256, 1024
BLOCK = 12 * WIDTH * WIDTH
TABLES = {"model": {"config": "LlamaConfig"}, "run": {"dtype": "bfloat16"}}


def held_by(schedule, stages, place):
    """Return micro-batches in flight, each of all blocks of a rank, in halves."""
    if schedule == "1f1b":
        return 2 * (stages - place)
    if schedule == "interleaved":
        return 3 * stages - 1 - 2 * place
    return 2 * stages


def invented(plan, coordinates, *, uneven=0):
    """Return a closed formula's trace."""
    mesh, data = plan.mesh, plan.data
    pp, place = mesh.pp, coordinates.get("pp", 0)
    assert set(coordinates) == set(mesh.axes)
    blocks = plan.model.overrides["num_hidden_layers"] // pp
    micros = plan.pipeline.micro_batches if pp > 1 else plan.run.accumulate
    samples = data.batch_size // (mesh.data_parallel * micros)
    assert samples * mesh.data_parallel * micros == data.batch_size
    tokens, recompute, reshard = samples * data.sequence_length // mesh.cp, bool(plan.memory.recompute), plan.fsdp
    first, last = place == 0, place == pp - 1
    held = held_by(plan.pipeline.schedule, pp, place) if pp > 1 else 2
    block, edge = BLOCK // mesh.tp, VOCABULARY * WIDTH * (first + last)
    shards = mesh.dp_shard * mesh.cp
    weights = (block * blocks + edge) // shards
    gathered = (block * (2 if reshard.reshard_after_forward else blocks) + edge) * 2 if shards > 1 else 0
    waiting = block * blocks * 2 if micros > 1 and pp == 1 else 0
    saved = tokens * WIDTH * (1 if recompute else 8)
    states = weights * 14
    live = [weights * 4]
    live += [states + gathered + waiting + held * saved * (index + 1) // 2 for index in range(blocks)]
    live.append(live[-1] + tokens * VOCABULARY * 6 * last + tokens * WIDTH * 8 * recompute + uneven * blocks**2)
    live += [states + gathered + waiting + held * saved * (blocks - index) // 2 for index in range(blocks)]
    begin = len(live)
    live += [states + weights * 8, states]
    extra = 4 if recompute else 3
    products = micros * tokens * (2 * block * blocks * extra + 6 * VOCABULARY * WIDTH * last)
    kernels = {
        "aten.mm.default(bfloat16[8,8|8,1])": 7 * blocks * micros * extra,
        f"aten.add.Tensor(bfloat16[{tokens},{WIDTH}|{WIDTH},1])": 2 * blocks * micros * extra,
        f"aten._foreach_mul_.Scalar([float32[{weights}|1]])": 3,
    }
    collectives = {}

    def send(kind, size, axes, calls):
        if calls:
            collectives[kind, size, axes] = Count(calls, size * calls)

    if mesh.tp > 1:
        send("all_reduce", tokens * WIDTH * 2, ("tp",), 2 * blocks * micros * extra)
    if mesh.cp > 1:
        send("all_to_all", tokens * WIDTH * 3, ("cp",), blocks * micros * 2)
    if mesh.ep > 1:
        send("all_to_all", tokens * WIDTH * 2, ("ep",), blocks * micros * 4)
    if shards > 1:
        axes = tuple(axis for axis in ("dp_shard", "cp") if axis in mesh.axes and getattr(mesh, axis) > 1)
        passes = 2 if reshard.reshard_after_forward else 1
        send("all_gather", block * 2, axes, blocks * micros * passes)
        send("reduce_scatter", block * 4, axes, blocks)
    if mesh.dp_replicate > 1:
        send("all_reduce", weights * 4, ("dp_replicate",), 1)
    if pp > 1:
        send("send", tokens * WIDTH * 2, ("pp",), micros)
    operations = sum(kernels.values()) + 3 * blocks * micros
    return Trace(tuple(live), max(live), products, operations, collectives, kernels, begin)


def machine(memory, *, host=4, network=5e9):
    levels = (Level("host", host, 3e-6, 50e9), Level("network", None, 12e-6, network))
    return Hardware("invented", memory, 0, {"bfloat16": 2e13}, 1e12, 2e-6, 1e-6, levels)


def brute(space, hardware, trace=invented):
    """Price every plan, one by one: seconds, memory and index of those that fit, the best first."""
    found = []
    for index in range(len(space)):
        row, plan = space.row(index), space.plan(index)
        plan = dataclasses.replace(
            plan, model=dataclasses.replace(plan.model, overrides={"num_hidden_layers": space.model.layers})
        )
        traces = [trace(plan, {**dict.fromkeys(plan.mesh.axes, 0), **at}) for at in places(plan)]
        options = {"micro_batches": row["micro_batches"], "schedule": SCHEDULES[row["schedule"]]}
        options["stages_a_rank"] = space.stages_a_rank[row["schedule"]]
        mesh = {axis: row[axis] for axis in MESH}
        seconds = [price(count_work(each), hardware, mesh, dtype="bfloat16", **options).one().total for each in traces]
        memory = max(each.peak for each in traces)
        if memory <= hardware.room:
            found.append((max(seconds), memory, index))
    return sorted(found)


def places(plan):
    return [{"pp": place} for place in range(plan.mesh.pp)] if plan.mesh.pp > 1 else [{}]


def random_space(seed):
    draw = random.Random(seed)
    experts = draw.choice((0, 0, 4))
    model = ModelSizes(layers=draw.choice((4, 6, 8, 12, 24)), heads=draw.choice((4, 8)), kv_heads=4, experts=experts)
    tables = {
        **TABLES,
        "data": {"batch_size": draw.choice((8, 12)), "sequence_length": draw.choice((1024, 2048))},
        "mesh": dict.fromkeys(draw.sample(("cp", "ep", "pp", "tp", "dp_replicate"), 3), 1),
    }
    if draw.random() < 0.7:
        tables["memory"] = {"recompute": []}
    hardware = machine(draw.choice((2**25, 2**26, 2**27, 2**28, 2**34)), network=draw.choice((1e9, 5e9, 50e9)))
    return tables, draw.choice((2, 4, 4, 6, 8)), model, hardware


@pytest.mark.parametrize("block", [0, *(pytest.param(each, marks=pytest.mark.thorough) for each in range(1, 10))])
def test_the_best_is_that_of_brute_force(block):
    """Twenty random spaces each."""
    for seed in range(20 * block, 20 * block + 20):
        tables, ranks, model, hardware = random_space(seed)
        space = enumerate_plans(tables, ranks, model, hardware)
        expected = brute(space, hardware)
        if not expected:
            with pytest.raises(NothingFits, match="memory|is legal"):
                tune(tables, ranks, model=model, hardware=hardware, trace=invented)
            continue
        tuned = tune(tables, ranks, model=model, hardware=hardware, trace=invented)
        best = tuned.candidates[0]
        assert best.seconds.total == pytest.approx(expected[0][0], rel=1e-8), seed
        assert len(tuned.candidates) == min(5, len(expected)), seed
        for candidate, (seconds, *_) in zip(tuned.candidates, expected, strict=False):
            assert candidate.seconds.total == pytest.approx(seconds, rel=1e-8), seed
            assert candidate.memory <= hardware.room
        twins = {memory for seconds, memory, _ in expected if seconds <= expected[0][0] * (1 + 1e-8)}
        assert min(abs(best.memory - memory) for memory in twins) <= 64, seed


LLAMA = ModelSizes(layers=32, heads=32, kv_heads=8)
MANY = {**TABLES, "data": {"batch_size": 2048, "sequence_length": 8192}}


def test_two_calls_give_one_answer_and_kept_curves_trace_nothing():
    hardware, curves = machine(2**27), Curves()
    data = {"data": {"batch_size": 16, "sequence_length": 2048}}
    calls = [
        tune({**TABLES, **data}, 8, model=LLAMA, hardware=hardware, trace=invented, curves=curves) for _ in range(2)
    ]
    again = tune({**TABLES, **data}, 8, model=LLAMA, hardware=hardware, trace=invented)
    assert calls[0].candidates == calls[1].candidates == again.candidates
    assert calls[0].fell_out == calls[1].fell_out == again.fell_out
    assert calls[0].traced == again.traced > 0
    assert calls[1].traced == 0


def test_fifty_thousand_plans_of_a_thousand_ranks():
    hardware, curves = machine(2**30, host=8), Curves()
    first = tune(MANY, 1024, model=LLAMA, hardware=hardware, trace=invented, curves=curves)
    begin = time.perf_counter()
    tuned = tune(MANY, 1024, model=LLAMA, hardware=hardware, trace=invented, curves=curves)
    seconds = time.perf_counter() - begin
    before = f"{first.traced} traces before, {len(curves.roles)} kinds"
    print(f"{tuned.searched} plans in {seconds:.2f} s from kept curves, {before}")
    assert tuned.searched > 50_000
    assert tuned.traced == 0
    assert tuned.candidates == first.candidates
    assert all(math.prod(each.plan.mesh.axes.values()) == 1024 for each in tuned.candidates)
    assert sum(tuned.fell_out.values()) <= tuned.searched


def test_a_candidate_says_why():
    data = {"data": {"batch_size": 16, "sequence_length": 2048}}
    best = tune({**TABLES, **data}, 8, model=LLAMA, hardware=machine(2**27), trace=invented).candidates[0]
    assert best.binds in best.seconds.parts
    assert best.plan.mesh.described in best.why
    assert "128 MiB" in best.why
    assert f"compute {best.seconds.compute / best.seconds.total:.0%}" in best.why
    assert best.measured is None


def test_real_steps_order_the_best():
    data = {"data": {"batch_size": 16, "sequence_length": 2048}}
    options = {"model": LLAMA, "hardware": machine(2**30), "trace": invented}
    plain = tune({**TABLES, **data}, 8, **options)
    order = {each.plan.to_toml(): float(-index) for index, each in enumerate(plain.candidates)}
    tuned = tune({**TABLES, **data}, 8, **options, measure=lambda plan: order[plan.to_toml()], measured=3)
    assert [each.plan for each in tuned.candidates[:3]] == [each.plan for each in plain.candidates[2::-1]]
    assert [each.measured for each in tuned.candidates[:4]] == [-2.0, -1.0, 0.0, None]


def test_refused_plans_make_room_for_the_next():
    data = {"data": {"batch_size": 16, "sequence_length": 2048}}
    options = {"model": LLAMA, "hardware": machine(2**30), "trace": invented}
    plain = tune({**TABLES, **data}, 8, **options, top=6)
    worst = plain.candidates[0].plan
    tuned = tune({**TABLES, **data}, 8, **options, top=5, refuses=lambda plan: plan == worst)
    assert [each.plan for each in tuned.candidates] == [each.plan for each in plain.candidates[1:]]
    assert tuned.fell_out["refused"] == 1


def test_kinds_whose_small_plans_are_refused_fall_out():
    tables = {**TABLES, "data": {"batch_size": 16, "sequence_length": 2048}, "mesh": {"pp": 1, "dp_replicate": 1}}
    options = {"model": LLAMA, "hardware": machine(2**34), "top": 1000}

    def refusing(refused):
        def trace(plan, coordinates):
            if refused(plan.mesh):
                raise PlanError([Diagnostic("mesh.cp", "does not suit the model", "leave it out")])
            return invented(plan, coordinates)

        return trace

    every = tune(tables, 8, **options, trace=invented).candidates
    found = tune(tables, 8, **options, trace=refusing(lambda mesh: mesh.cp > 1))
    assert [each.plan for each in found.candidates] == [each.plan for each in every if each.plan.mesh.cp == 1]
    assert found.fell_out["refused"] == len(every) - len(found.candidates)
    others = tune(tables, 8, **options, trace=refusing(lambda mesh: mesh.tp == mesh.cp == 1)).candidates
    assert [each.plan for each in others] == [each.plan for each in every if each.plan.mesh.tp * each.plan.mesh.cp > 1]
    with pytest.raises(NothingFits, match=r"The last one was refused: the plan has 1 error:\n  mesh.cp: does not suit"):
        tune(tables, 8, **options, trace=refusing(lambda mesh: True))


def test_nothing_fits_says_what_is_least():
    data = {"data": {"batch_size": 16, "sequence_length": 2048}}
    with pytest.raises(
        NothingFits, match=r"The one that needs least, .* takes .* of 64 KiB, .* too much: give more ranks"
    ):
        tune({**TABLES, **data}, 8, model=LLAMA, hardware=machine(2**16), trace=invented)
    with pytest.raises(NothingFits, match=r"is legal: the batch divides over dp"):
        tune({**TABLES, "mesh": {"dp_shard": 7}, **data}, 7, model=LLAMA, hardware=machine(2**30), trace=invented)


def test_blocks_that_are_not_alike_are_refused():
    data = {"data": {"batch_size": 16, "sequence_length": 2048}}

    def uneven(plan, coordinates):
        return invented(plan, coordinates, uneven=2**20)

    with pytest.raises(NotLinear, match="the blocks are not all alike"):
        tune({**TABLES, **data}, 8, model=LLAMA, hardware=machine(2**30), trace=uneven)
