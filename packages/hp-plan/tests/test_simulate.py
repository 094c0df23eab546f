"""A rank that one device plays computes, holds and sends what a dry run says, with values that stay finite."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from dry_plans import HOST, THOROUGH, USUAL, told

from hp_plan import ParallelPlan, PlanError, dry_run, simulate_rank
from hp_plan.dry.simulated import Measured, estimate
from hp_plan.dry.stages import Repeating, Said
from hp_plan.dry.trace import Count, Trace
from hp_plan.torch.dry import playing
from hp_plan.torch.dry.simulating import run_rank
from hp_plan.tuning.hardware import Hardware, seconds_of
from hp_platform.torch.dry import Alike
from hp_testing import device_type

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="bytes are counted on the CPU"),
]

FIRST = ("fsdp", "ep")
MORE = ("tp", "cp", "muon, recompute, bfloat16", "pp")
PLANS = {**USUAL, **THOROUGH, **HOST}
COMPARED = [*FIRST, *(pytest.param(name, marks=pytest.mark.thorough) for name in (*MORE, *THOROUGH, *HOST))]


def ranks_of(name: str) -> tuple[ParallelPlan, int]:
    """Return a plan on several times as many ranks as its own, which dp_shard takes."""
    plan = ParallelPlan.from_dict(PLANS[name])
    return plan, plan.mesh.world_size * 4 if plan.mesh.dp_shard > 1 else plan.mesh.world_size


@pytest.mark.parametrize("name", COMPARED)
def test_a_played_rank_does_what_a_dry_run_says(name: str) -> None:
    plan, ranks = ranks_of(name)
    for rank in {ranks - 1} if name in FIRST else {0, ranks - 1}:
        found = simulate_rank(plan, ranks=ranks, rank=rank, steps=2)
        said = next(each for each in dry_run(plan, ranks=ranks, rank=rank).ranks if each.rank == rank)
        assert told(found.report) == told(said), f"rank {rank}"
        assert found.peak == said.peak.live and not found.allocated


@pytest.mark.parametrize(
    "name", ["fsdp", "ep", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("fsdp x tp", "tp", "cp"))]
)
def test_losses_and_weights_stay_finite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    whole = playing.backward_loss

    def noted(*args: Any, **options: Any) -> Any:
        loss = whole(*args, **options)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(playing, "backward_loss", noted)
    threads = torch.get_num_threads()
    try:  # in this process; it raises where a weight is not finite
        run_rank(ParallelPlan.from_dict(PLANS[name]), 0, 3, 1.0, None, Alike())  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert len(losses) == 6 and all(map(math.isfinite, losses)) and len(set(losses)) > 1


def test_a_report_tells_what_was_measured_and_what_was_counted() -> None:
    found = simulate_rank(ParallelPlan.from_dict(PLANS["fsdp"]), ranks=64, rank=5, steps=2, hardware="h100-8")
    text, numbers = str(found), json.loads(json.dumps(found.as_json()))
    assert "rank 5 (dp_shard 5) of 64, dp_shard 64" in text and "losses mean nothing" in text
    assert "counted for h100-8" in text and "measured" in text and max(map(len, text.splitlines())) <= 80
    assert numbers["rank"] == 5 and numbers["steps"] == 1 and numbers["measured"]["compute"] > 0
    assert set(numbers["communication"]) == {"dp_shard"} and numbers["communication"]["dp_shard"] > 0
    assert numbers["seconds"]["total"] == pytest.approx(
        found.measured.compute + found.measured.optimizer + sum(found.seconds.exposed.values())
    )


def test_what_is_not_simulated_is_refused() -> None:
    plan = ParallelPlan.from_dict(PLANS["fsdp"])
    with pytest.raises(ValueError, match="rank 64 is none of 64 ranks"):
        simulate_rank(plan, ranks=64, rank=64)
    with pytest.raises(PlanError, match="3 ranks are not a multiple of 2"):
        simulate_rank(ParallelPlan.from_dict(PLANS["tp"]), ranks=3)
    with pytest.raises(ValueError, match="takes 2 steps or more"):
        simulate_rank(plan, steps=1)
    with pytest.raises(ValueError, match="there is no hardware 'h100'"):
        simulate_rank(plan, hardware="h100")
    staged = {**PLANS["pp"], "pipeline": {"schedule": "v-half", "micro_batches": 4}}
    with pytest.raises(PlanError, match="no formula for the bubble of 'v-half'"):
        simulate_rank(ParallelPlan.from_dict(staged))
    with pytest.raises(PlanError, match=r"memory\.budget"):
        simulate_rank(ParallelPlan.from_dict({**PLANS["fsdp"], "memory": {"budget": "1GiB"}}))


def test_weights_that_are_not_finite_are_refused() -> None:
    tables = {**PLANS["fsdp"], "run": {"dtype": "float32"}, "optimizer": {"name": "sgd", "lr": 1e38}}
    with pytest.raises(ValueError, match="is not finite any more"):
        simulate_rank(ParallelPlan.from_dict(tables), steps=3)


# ---- prices ----
def trace(collectives: dict[tuple[str, int, tuple[str, ...]], Count]) -> Trace:
    return Trace((0,), 0, 10**12, 100, collectives, {"aten.mm.default(float32[2,2|2,1])": 3}, 1)


def test_messages_are_priced_by_the_machine_and_compute_is_what_was_measured() -> None:
    plan = ParallelPlan.from_dict({**PLANS["fsdp x tp"], "mesh": {"dp_shard": 8, "tp": 8}})
    machine, measured = Hardware.load("h100-8"), Measured(0.5, 0.25, None, 0.125)
    gathers, sums = Count(2, 2 << 30), Count(4, 4 << 20)
    found = trace({("all_gather", 1 << 30, ("dp_shard",)): gathers, ("all_reduce", 1 << 20, ("tp",)): sums})
    alone, seconds = estimate(plan, found, measured, machine)
    inside = seconds_of(machine, "all_reduce", sums.bytes, (8, 1), calls=4)
    across = seconds_of(machine, "all_gather", gathers.bytes, (1, 8), calls=2)
    assert alone == pytest.approx({"dp_shard": across, "tp": inside})
    assert (seconds.compute, seconds.optimizer, seconds.bubble) == (0.5, 0.25, 0)
    assert seconds.exposed == pytest.approx({"tp": inside}), "compute hides what dp_shard sends"


def test_stages_wait_for_each_other() -> None:
    plan = ParallelPlan.from_dict({**PLANS["pp"], "pipeline": {"schedule": "1f1b", "micro_batches": 8}})
    _, seconds = estimate(plan, trace({}), Measured(0.8, 0.1, None, 0.0), Hardware.load("cpu"))
    assert seconds.bubble == pytest.approx(0.1) and seconds.total == pytest.approx(1.0)


# ---- stages that are not there ----
def test_stages_say_once_more_what_they_said() -> None:
    said = Said([((0, 1), b"ab", [b"ab", b"ab", b"xy"])], [(1, 3, b"shape")])
    peers = Repeating(said)
    assert peers.gather(b"cd", [0, 1]) == [b"cd", b"cd", b"xy"] and peers.receive(1, 3) == b"shape"
    for ask in (lambda: Repeating(said).gather(b"cd", [1, 2]), lambda: Repeating(said).receive(0, 3)):
        with pytest.raises(NotImplementedError, match="a stage of a pipeline can't be played by itself"):
            ask()
