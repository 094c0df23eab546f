"""A dry run says of each rank what real ranks measure, to the byte."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_plans import THOROUGH, USUAL, measured, plan_tables, told

from hp_fsdp import explain
from hp_plan import DryReport, ParallelPlan, PlanError, dry_run, fit, tune
from hp_plan.dry.stages import StagePeers, play_stages
from hp_plan.dry.trace import Trace
from hp_plan.port import models
from hp_plan.structure.memory import training_bytes
from hp_plan.torch.build import build_empty
from hp_plan.torch.dry.flops import flops_of
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.dry.likeness import Results
from hp_plan.torch.dry.playing import Played, dry
from hp_plan.tuning.curves import Curve, Point
from hp_platform.torch.dry import dry_world
from hp_testing import device_type, run_ranks
from hp_testing.pools.pool import close_pool

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="bytes of real ranks are counted on the CPU"),
]

CASES = [
    *USUAL.items(),
    *(pytest.param(*each, marks=pytest.mark.thorough, id=each[0]) for each in THOROUGH.items()),
]


def world(tables: dict[str, Any]) -> int:
    return math.prod(size for axis, size in tables["mesh"].items() if axis != "ep")


@pytest.mark.parametrize(("name", "tables"), CASES)
def test_real_ranks_measure_what_a_dry_run_says(name: str, tables: dict[str, Any]) -> None:
    close_pool(world(tables))  # ranks that ran before have tensors that a first run makes
    real = run_ranks(world(tables), measured, tables)
    plan = ParallelPlan.from_dict(tables)
    report = dry_run(plan)
    at_once = replace(plan, run=replace(plan.run, accumulate=1))
    bound = training_bytes(at_once, models().outline(build_empty(plan)))
    assert bound <= report.peak, "plans are left out by it, and not played"
    assert 0 in {each.rank for each in report.ranks}
    for each in report.ranks:
        assert told(each) == real[each.rank], f"rank {each.rank} of {name}"


def explained(tables: dict[str, Any], report: DryReport) -> dict[str, tuple[int | None, int | None]]:
    plan = ParallelPlan.from_dict(tables)
    played = Played(plan, Ledger(("cpu",)), torch.device("cpu"))
    for _ in range(2):
        played.step()
    told = explain(played.model, optimizer=played.optimizer, dry_run=report.ranks[0])
    return {row.kind: (row.dry_run, row.measured) for row in told.memory}


def test_explain_shows_it_beside_what_is_measured() -> None:
    report = dry_run(ParallelPlan.from_dict(USUAL["fsdp"]), rank=0, memory=True)
    rows = run_ranks(2, explained, USUAL["fsdp"], report)[0]
    for kind in ("parameters", "gradients", "optimizer"):  # but for what a shard is padded by
        assert rows[kind][0] == pytest.approx(rows[kind][1], rel=0.01), kind
    assert rows["device peak, of all kinds"] == (report.peak, None)


def test_live_bytes_do_not_grow_from_step_to_step() -> None:
    plan = ParallelPlan.from_dict(USUAL["tp"])
    with dry(plan, 0, steps=2) as played:
        second = played.ledger.live
        for _ in range(3):
            played.step()
        assert played.ledger.live == second


def test_a_report_shows_who_holds_memory_and_what_is_sent() -> None:
    report = dry_run(ParallelPlan.from_dict(USUAL["fsdp"]), ranks=16, memory=True)
    assert report.world_size == 16 and [each.rank for each in report.ranks] == [0, 15]
    first = report.ranks[0]
    assert sum(first.peak.by_kind.values()) == first.peak.live == report.peak
    assert first.peak.phase == "backward" and first.peak.module.startswith("LlamaForCausalLM")
    assert max(sum(values) for values in zip(*first.memory.values(), strict=True)) <= first.peak.live
    assert first.trace.peak == max(first.trace.live) == first.peak.live
    text = str(report)
    assert "dry run: 16 ranks, dp_shard 16" in text and "all_gather" in text and "masking_utils.py" in text
    assert max(map(len, text.splitlines())) <= 80
    assert report.as_json()["ranks"][0]["peak"]["live"] == first.peak.live


def test_what_can_not_be_played_is_refused() -> None:
    plan = ParallelPlan.from_dict(USUAL["tp"])
    with pytest.raises(PlanError, match="7 ranks are not a multiple of 2"):
        dry_run(plan, ranks=7)
    with pytest.raises(ValueError, match="rank 5 is none of 2 ranks"):
        dry_run(plan, rank=5)


def test_one_rank_of_many_is_played() -> None:
    [report] = dry_run(ParallelPlan.from_dict(USUAL["fsdp"]), ranks=8, rank=3).ranks
    assert report.rank == 3 and report.coordinates == {"dp_shard": 3} and report.stands_for == 8


def test_other_ranks_add_no_operations() -> None:
    """What they tell each other is no work of the step, and curves follow its operations from one number to another."""
    found = []
    for shards in (2, 8):
        tables = plan_tables({"dp_shard": shards, "cp": 2}, data={"batch_size": 2 * shards})
        found.append(dry_run(ParallelPlan.from_dict(tables), rank=0).ranks[0].trace.operations)
    assert found[0] == found[1]


def test_skewed_routes_take_more_memory() -> None:
    plan = ParallelPlan.from_dict(USUAL["ep"])
    balanced, skewed = (dry_run(plan, rank=0, routes=factor).peak for factor in (1.0, 2.0))
    assert skewed > balanced
    with pytest.raises(ValueError, match="a factor of 3 is not from 1 to 2"):
        dry_run(plan, routes=3)


# ---- fit and tune ----
def test_fit_names_the_largest_and_what_comes_next() -> None:
    plan = ParallelPlan.from_dict({**USUAL["fsdp"], "data": {"sequence_length": 32, "batch_size": 4}})
    two = dry_run(plan, rank=0).peak
    found = fit(plan, memory=two, most=3)
    assert found.value == 2 and found.peak == two and found.beyond is not None and found.beyond[1] > two


@pytest.mark.thorough
def test_fit_names_what_would_be_enough() -> None:
    less = fit(ParallelPlan.from_dict(USUAL["fsdp"]), memory="300KiB", most=2)
    assert less.value is None and less.excess == less.peak - 300 * 1024 and "too much" in str(less)


@pytest.mark.thorough
def test_tune_finds_plans_that_fit() -> None:
    tables = {**USUAL["fsdp"], "mesh": {}}
    config = {**tables["model"]["overrides"], "num_hidden_layers": 6}
    tables = {**tables, "model": {**tables["model"], "overrides": config}, "pipeline": {"schedule": "1f1b"}}
    found = tune(tables, ranks=2, hardware="cpu", free=("mesh",), top=3)
    assert found.searched > len(found.candidates) == 3 and found.traced
    assert [each.seconds.total for each in found.candidates] == sorted(each.seconds.total for each in found.candidates)
    best = found.candidates[0]
    assert best.plan.mesh.world_size == 2 and dry_run(best.plan).peak == pytest.approx(best.memory, rel=0.02)


def test_what_is_wrong_with_every_plan_is_said_before_any_is_played() -> None:
    tables = {**USUAL["fsdp"], "data": {"batch_size": 4, "sequence_length": 2**20}, "mesh": {"tp": 3}}
    with pytest.raises(PlanError, match=r"has 1 error:\n  data.sequence_length: 1048576 tokens"):
        tune(tables, ranks=2, hardware="cpu")


def sized(tables: dict[str, Any], samples: int, length: int) -> ParallelPlan:
    """Return a plan whose micro-batches have so many samples of so many tokens."""
    parts = tables["mesh"].get("dp_shard", 1) * tables["mesh"].get("dp_replicate", 1)
    parts *= tables.get("pipeline", {}).get("micro_batches", 1) * tables["run"].get("accumulate", 1)
    return ParallelPlan.from_dict(
        {**tables, "data": {**tables["data"], "batch_size": samples * parts, "sequence_length": length}}
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*USUAL, *THOROUGH])
def test_curves_of_nine_traces_lead_to_the_bytes_of_other_sizes(name: str) -> None:
    tables = {**USUAL, **THOROUGH}[name]

    def traced(point: Point) -> Trace:
        return dry_run(sized(tables, point.micro_batch, point.length), rank=0).ranks[0].trace

    points = [Point(samples, length) for samples in (2, 3, 5) for length in (16, 24, 40)]
    curve = Curve.fit(points, [traced(point) for point in points])
    for samples, length in ((4, 32), (6, 48), (7, 56), (8, 64)):
        point = Point(samples, length)
        assert curve.peak(point) == traced(point).peak, f"{samples} samples of {length} tokens"


# ---- results that are remembered ----
def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_an_operator_is_asked_once_for_alike_tensors() -> None:
    aten, results = torch.ops.aten, Results()
    first, again = (results.call(aten.mul.Tensor, (on_meta(3, 1), on_meta(4)), {}) for _ in range(2))
    assert (again.shape, again.stride(), again.dtype) == (first.shape, first.stride(), first.dtype)
    assert again.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert results.call(aten.mul.Tensor, (on_meta(3, 1), on_meta(5)), {}).shape == (3, 5)
    assert results.call(aten.mul.Tensor, (on_meta(3, 1, dtype=torch.bfloat16), on_meta(4)), {}).dtype is torch.float32
    for _ in range(2):
        values, places = results.call(aten.topk.default, (on_meta(2, 8), 3), {})
        assert values.shape == places.shape == (2, 3) and places.dtype is torch.int64
    assert results.call(aten.sum.dim_IntList, (on_meta(2, 8), [1], True), {}).shape == (2, 1)
    assert results.call(aten.sum.dim_IntList, (on_meta(2, 8), [1], False), {}).shape == (2,)


def test_what_shares_memory_is_never_remembered() -> None:
    aten, results = torch.ops.aten, Results()
    for func, args in ((aten.view.default, ([6],)), (aten._unsafe_view.default, ([6],)), (aten.t.default, ())):
        for _ in range(2):
            whole = on_meta(2, 3)
            view = results.call(func, (whole, *args), {})
            assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
    for _ in range(2):
        changed = on_meta(4)
        assert results.call(aten.add_.Tensor, (changed, on_meta(4)), {}) is changed
        results.call(aten.unsqueeze_.default, (changed, 0), {})
        results.call(aten._foreach_add_.Scalar, ([changed], 1.0), {})
        assert changed.shape == (1, 4)
    with pytest.raises(RuntimeError):
        results.call(aten.add_.Tensor, (on_meta(4), on_meta(5)), {})


# ---- operations ----
def test_every_product_is_counted() -> None:
    aten = torch.ops.aten
    rows, matrices = on_meta(12, 8), on_meta(3, 8, 5)
    grouped = {(rows, matrices): 12, (on_meta(3, 4, 8), on_meta(8, 5)): 4, (rows, on_meta(8, 5)): 12}
    for args, count in {**grouped, (on_meta(3, 4, 8), matrices): 12}.items():
        assert flops_of(aten._grouped_mm.default, args, {}, None) == 2 * count * 8 * 5
    q, k, v = on_meta(2, 4, 6, 8), on_meta(2, 4, 7, 8), on_meta(2, 4, 7, 3)
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    scores = 2 * 2 * 4 * 6 * 7
    assert flops_of(forward.default, (q, k, v), {}, None) == scores * (8 + 3)
    assert flops_of(backward.default, (on_meta(2, 4, 6, 3), q, k, v), {}, None) == scores * (3 * 8 + 2 * 3)
    assert flops_of(aten.add.Tensor, (rows, rows), {}, rows) == 0


@pytest.mark.parametrize("family", ["llama", "experts"])
def test_operations_are_those_of_the_formula(family: str) -> None:
    """Three products for each weight and token, of as many experts as are chosen; attention is 2 and 5 products."""
    tables = plan_tables({"dp_shard": 2}, family)
    numbers, samples, length = tables["model"]["overrides"], 4, tables["data"]["sequence_length"]
    blocks, heads = numbers["num_hidden_layers"], numbers["num_attention_heads"]
    hidden, head = numbers["hidden_size"], 16
    of_attention = hidden * head * (2 * heads + 2 * numbers["num_key_value_heads"])
    of_mlp = 3 * hidden * numbers["intermediate_size"]
    if family == "experts":
        chosen = numbers["num_experts_per_tok"]
        of_mlp = 3 * hidden * numbers["moe_intermediate_size"] * chosen + hidden * numbers["num_experts"]
    weights = blocks * (of_attention + of_mlp) + hidden * numbers["vocab_size"]
    attention = blocks * 7 * 2 * samples * heads * length**2 * head
    report = dry_run(ParallelPlan.from_dict(tables))
    assert report.ranks[0].trace.flops == 6 * samples * length * weights + attention


def test_kernels_are_chosen_as_on_the_machine() -> None:
    """On a CPU an activation is computed some rows at a time, which stay in its cache."""
    tables = plan_tables({"dp_shard": 2}, "experts", data={"sequence_length": 1024, "batch_size": 4})
    tables["model"]["overrides"]["max_position_embeddings"] = 1024
    plan = ParallelPlan.from_dict(tables)
    own, host, device = (dry_run(plan, rank=0, hardware=each).ranks[0].trace for each in (None, "cpu", "h100-8"))
    assert own == host
    assert device.operations < host.operations and device.flops == host.flops


# ---- worlds ----
def in_a_world() -> None:
    with pytest.raises(RuntimeError, match="can't begin in a process that has a process group"), dry_world(4, 0):
        pass


def test_a_dry_world_has_no_other_beside_it() -> None:
    run_ranks(2, in_a_world)


def test_peers_say_what_this_rank_says() -> None:
    from hp_platform import get_platform
    from hp_platform.extend import reduce_numbers, share_bytes, share_numbers

    with dry_world(8, 3):
        group = get_platform().groups.default_group()
        assert (get_platform().groups.rank(), get_platform().groups.size()) == (3, 8)
        assert share_bytes(b"x" * 100, group) == [b"x" * 100] * 8
        assert share_numbers([3, 0.5], group) == [[3, 0.5]] * 8
        assert reduce_numbers([3], "sum", group) == [24] and reduce_numbers([2.5], "max", group) == [2.5]
        assert get_platform().devices.current_device() == torch.device("meta")
    assert not get_platform().groups.is_initialized()


def talk(number: int, peers: StagePeers) -> list[bytes]:
    heard = peers.gather(b"%d" % number, [0, 1, 2, 3])
    if number == 0:
        peers.send(b"to the last", 3, 7)
        return heard
    return [*heard, peers.receive(0, 7)]


def fail(number: int, peers: StagePeers) -> None:
    if number:
        raise LookupError("nothing here")
    peers.gather(b"", [0, 3])


def half(rank: int) -> int:
    return rank // 2


def test_stages_hear_each_other() -> None:
    assert play_stages(talk, {0: (0,), 1: (1,)}, half) == {
        0: [b"0", b"0", b"1", b"1"],
        1: [b"0", b"0", b"1", b"1", b"to the last"],
    }
    with pytest.raises(LookupError, match="nothing here"):
        play_stages(fail, {0: (0,), 1: (1,)}, half)


# ---- the ledger ----
def test_the_ledger_follows_storages() -> None:
    with Ledger(("cpu",)) as ledger:
        ledger.begin("forward")
        kept = torch.ones(256)
        torch.ones(1024).sum()
        kept.untyped_storage().resize_(0)
        assert ledger.live == 0
        kept.untyped_storage().resize_(2048)
        assert ledger.live == 2048
    changes = [by for _, _, by in ledger.step.changes]
    assert sum(changes) == 2048 and 4096 in changes and -4096 in changes


def test_no_code_asks_whether_its_world_is_dry() -> None:
    """The port answers; what it answers for may not depend on the question."""
    packages = Path(__file__).parents[2]
    plays = ("hp_plan/dry/", "hp_plan/torch/dry/", "hp_plan/torch/timing/", "hp_plan/__init__.py", "/commands/")
    own = ("hp_platform/torch/dry/", *plays)
    asking = [
        str(path)
        for path in packages.glob("*/src/**/*.py")
        if re.search(r"\bdry_world\b|\.dry\b|\bis_dry\b", path.read_text())
        and not any(part in str(path) for part in own)
    ]
    assert [path for path in asking if not re.search(r"hp_plan/(extend|port|tuning/)", path)] == []
