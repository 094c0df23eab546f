"""The plans of a number of ranks, counted beside loops in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from hp_plan import ParallelPlan
from hp_plan.tuning.hardware import Hardware
from hp_plan.tuning.space import COLUMNS, MESH, RULES, SCHEDULES, ModelSizes, enumerate_plans

H100 = Hardware.load("h100-8")
SIZES = ModelSizes(layers=12, heads=8, kv_heads=4)
TABLES = {
    "model": {"config": "LlamaConfig", "overrides": {"hidden_size": 64}},
    "data": {"batch_size": 24, "sequence_length": 2048},
}


def divisors(number):
    return [each for each in range(1, number + 1) if number % each == 0]


def brute(ranks, sizes, batch, length):
    """List plans one by one."""
    found = []
    for mesh in itertools.product(divisors(ranks), repeat=5):
        replicate, shard, cp, tp, pp = mesh
        if math.prod(mesh) != ranks or tp > 8 or sizes.heads % tp or sizes.kv_heads % tp or sizes.layers % pp:
            continue
        if cp > 1 and (length % (2 * cp) or length < 512 * cp) or batch % (replicate * shard):
            continue
        sharing = shard * cp * tp
        for ep in [each for each in divisors(sharing) if each <= max(1, sizes.experts)]:
            if (ep % tp and shard * cp % ep) or (ep > 1 and sizes.experts % ep):
                continue
            samples = batch // (replicate * shard)
            for micros, recompute, reshard, schedule in itertools.product(divisors(samples), (0, 1), (0, 1), range(4)):
                if (schedule > 0) != (pp > 1) or (shard * cp == 1 and not reshard):
                    continue
                chunks = 2 if schedule >= 2 else 1
                if pp > 1 and (micros < pp or sizes.layers % (pp * chunks)):
                    continue
                found.append((*mesh, ep, micros, recompute, reshard, schedule))
    return sorted(found)


@pytest.mark.parametrize("ranks", [1, 6, 8, 16])
@pytest.mark.parametrize("experts", [0, 4])
def test_plans_are_those_of_loops(ranks, experts):
    sizes = dataclasses.replace(SIZES, experts=experts)
    space = enumerate_plans(TABLES, ranks, sizes, H100)
    rows = list(zip(*(space.columns[name].tolist() for name in COLUMNS), strict=True))
    assert rows == brute(ranks, sizes, 24, 2048)
    assert space.searched == len(space) + sum(space.fell_out.values())
    assert set(space.fell_out) <= set(RULES)


def test_a_plan_says_what_its_numbers_say():
    space = enumerate_plans(TABLES, 16, dataclasses.replace(SIZES, experts=4), H100)
    seen, some = set(), range(0, len(space), len(space) // 60)
    for index in some:
        row, plan = space.row(index), space.plan(index)
        assert {axis: getattr(plan.mesh, axis) for axis in MESH} == {axis: row[axis] for axis in MESH}
        assert plan.mesh.world_size == 16
        micros = plan.pipeline.micro_batches if row["pp"] > 1 else plan.run.accumulate
        assert micros == row["micro_batches"]
        assert bool(plan.memory.recompute) == row["recompute"]
        assert plan.fsdp.reshard_after_forward == row["reshard"]
        if row["pp"] > 1:
            assert (plan.pipeline.schedule, plan.pipeline.split) == (SCHEDULES[row["schedule"]], "even")
        assert (plan.data.batch_size, plan.model.overrides) == (24, {"hidden_size": 64})
        seen.add(plan.to_toml())
    assert len(seen) == len(some)


def test_what_is_given_is_kept_unless_it_is_free():
    given = {**TABLES, "mesh": {"tp": 2, "cp": 1}, "memory": {"recompute": ["model.layers.0"]}}
    space = enumerate_plans(given, 8, SIZES, H100)
    assert set(space.columns["tp"]) == {2}
    assert set(space.columns["cp"]) == {1}
    assert {space.plan(index).memory.recompute for index in range(0, len(space), 9)} == {("model.layers.0",)}
    free = enumerate_plans(given, 8, SIZES, H100, free=["mesh", "memory.recompute"])
    open_ = enumerate_plans(TABLES, 8, SIZES, H100)
    assert all((free.columns[name] == open_.columns[name]).all() for name in COLUMNS)
    assert free.plan(3) == open_.plan(3)
    with pytest.raises(ValueError, match=r"free: 'mesh.tq' is not chosen; did you mean 'mesh.tp'"):
        enumerate_plans(given, 8, SIZES, H100, free=["mesh.tq"])
    with pytest.raises(ValueError, match="'gpipe', but plans are chosen among 1f1b, interleaved, zbv"):
        enumerate_plans({**TABLES, "pipeline": {"schedule": "gpipe"}}, 8, SIZES, H100)


def test_sections_without_effect_keep_plans_out():
    given = {**TABLES, "fsdp": {"param_dtype": "bfloat16"}, "pipeline": {"micro_batches": 8}}
    space = enumerate_plans(given, 8, SIZES, H100)
    assert (space.columns["dp_shard"] * space.columns["cp"] > 1).all()
    assert (space.columns["pp"] > 1).all()
    assert set(space.columns["micro_batches"]) == {8}
    assert space.fell_out["[fsdp] has an effect"] > 0
    assert space.fell_out["[pipeline] has an effect"] > 0


def test_tables_of_fewer_layers_and_other_batches():
    space = enumerate_plans(TABLES, 8, SIZES, H100)
    plan = ParallelPlan.from_dict(space.tables({**space.row(0), "pp": 1}, layers=3, batch_size=6, sequence_length=64))
    assert plan.model.overrides == {"hidden_size": 64, "num_hidden_layers": 3}
    assert (plan.data.batch_size, plan.data.sequence_length) == (6, 64)


def test_fifty_thousand_plans_of_a_thousand_ranks():
    data = {"batch_size": 4096, "sequence_length": 8192}
    llama = ModelSizes(layers=32, heads=32, kv_heads=8)
    space = enumerate_plans({**TABLES, "data": data}, 1024, llama, H100)
    assert space.searched > 100_000
    assert (np_product(space) == 1024).all()


def np_product(space):
    product = 1
    for axis in MESH[:-1]:
        product = product * space.columns[axis]
    return product
