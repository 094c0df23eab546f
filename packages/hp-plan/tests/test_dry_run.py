"""A dry run says of each rank what real ranks measure, to the byte."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_plans import THOROUGH, USUAL, measured, told

from hp_plan import ParallelPlan, PlanError, dry_run, fit, tune
from hp_plan.dry.stages import Players, StagePeers
from hp_plan.torch.dry.api import play_rank, stage_of
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.dry.playing import dry
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
    report = dry_run(ParallelPlan.from_dict(tables))
    assert 0 in {each.rank for each in report.ranks}
    for each in report.ranks:
        assert told(each) == real[each.rank], f"rank {each.rank} of {name}"


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


def test_skewed_routes_take_more_memory() -> None:
    plan = ParallelPlan.from_dict(USUAL["ep"])
    balanced, skewed = (dry_run(plan, rank=0, routes=factor).peak for factor in (1.0, 2.0))
    assert skewed > balanced
    with pytest.raises(ValueError, match="a factor of 3 is not from 1 to 2"):
        dry_run(plan, routes=3)


# ---- fit and tune ----
def test_fit_names_the_largest_and_what_comes_next() -> None:
    plan = ParallelPlan.from_dict(USUAL["fsdp"])
    one = dry_run(plan, rank=0).peak
    found = fit(plan, memory=one, most=8)
    assert found.value == 4 and found.peak == one and found.beyond is not None and found.beyond[1] > one
    less = fit(plan, memory="300KiB", most=2)
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


@pytest.mark.thorough
def test_a_process_plays_plan_after_plan_as_a_new_one_does() -> None:
    with Players() as kept:
        for name in ("fsdp", "tp", "cp", "ep", "muon, recompute, bfloat16", "fsdp"):
            plan = ParallelPlan.from_dict(USUAL[name])
            place = functools.partial(stage_of, plan.mesh)
            [after] = kept.play(play_rank, {0: (plan, 0, False, True, 1.0)}, place).values()
            new = dry_run(plan, rank=0, kernels=True).ranks[0]
            assert (after.trace, after.peak) == (new.trace, new.peak), name


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


def alone(number: int, peers: StagePeers) -> list[bytes]:
    return peers.gather(b"%d" % number, [0, 1])


def half(rank: int) -> int:
    return rank // 2


def test_stages_hear_each_other() -> None:
    with Players() as players:
        for _ in range(2):  # by the same processes
            assert players.play(talk, {0: (0,), 1: (1,)}, half) == {
                0: [b"0", b"0", b"1", b"1"],
                1: [b"0", b"0", b"1", b"1", b"to the last"],
            }
        with pytest.raises(LookupError, match="nothing here"):
            players.play(fail, {0: (0,), 1: (1,)}, half)
        assert players.play(alone, {0: (5,)}, half) == {0: [b"5", b"5"]}


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
    own = ("hp_platform/torch/dry/", "hp_plan/dry/", "hp_plan/torch/dry/", "hp_plan/__init__.py", "/commands/")
    asking = [
        str(path)
        for path in packages.glob("*/src/**/*.py")
        if re.search(r"\bdry_world\b|\.dry\b|\bis_dry\b", path.read_text())
        and not any(part in str(path) for part in own)
    ]
    assert [path for path in asking if not re.search(r"hp_plan/(extend|tuning/)", path)] == []
