"""`propose` plays few plans, and the first that fits is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hp_plan import ParallelPlan, PlanError, dry_run, lint
from hp_plan.dry.report import DryReport, Moment, RankReport
from hp_plan.dry.trace import Trace
from hp_plan.extend import propose

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
TABLES: dict[str, Any] = {"model": {"config": "LlamaConfig", "overrides": SIZES}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MiB = 2**20


def told(peak: int) -> DryReport:
    moment = Moment(peak, {"weights": peak, "host": 0}, 0, "forward", "", ())
    return DryReport("", 1, (RankReport(0, {}, 1, False, moment, 0, 0, Trace((), peak, 0, 0, {}, {}, 0), {}, ()),))


class Players:
    """Tells invented peaks, and remembers which plans it was asked for."""

    def __init__(self, peak: Callable[[ParallelPlan], int]) -> None:
        self.peak, self.played = peak, list[str]()

    def __call__(self, plan: ParallelPlan) -> DryReport:
        saving = "recompute" if plan.memory.recompute else "accumulate" if plan.run.accumulate > 1 else "none"
        self.played.append(f"{plan.mesh.described}, {saving}")
        return told(self.peak(plan))


def usual(plan: ParallelPlan) -> int:
    """Return 400 MiB where nothing is saved, and half of it with twice the tp."""
    return (200 if plan.memory.recompute else 300 if plan.run.accumulate > 1 else 400) * MiB // plan.mesh.tp


@pytest.mark.parametrize(
    ("memory", "played"),
    [
        (None, ["dp_shard 4, none"]),
        (400, ["dp_shard 4, none"]),
        (300, ["dp_shard 4, none", "dp_shard 4, recompute", "dp_shard 4, accumulate"]),
        (200, ["dp_shard 4, none", "dp_shard 4, recompute", "dp_shard 4, accumulate"]),
        (199, ["dp_shard 4, none", "dp_shard 4, recompute", "dp_shard 2 x tp 2, none"]),
        (99, ["dp_shard 4, none", "dp_shard 4, recompute", "dp_shard 2 x tp 2, none", "dp_shard 2 x tp 2, recompute"]),
    ],
)
def test_few_plans_are_played(memory: int | None, played: list[str]) -> None:
    play = Players(usual)
    found = propose(TABLES, 4, play=play, memory=None if memory is None else memory * MiB)
    assert play.played[: len(played)] == played and len(set(play.played)) == len(play.played) <= 7
    assert found.estimate.total == usual(found.plan) <= (memory or 400) * MiB
    assert lint(found.plan, 4) == ()


def test_where_no_plan_fits_the_least_is_named() -> None:
    play = Players(usual)
    with pytest.raises(PlanError, match=r"4 ranks of 49 MiB can't train the model: .*tp 4 needs least, 50 MiB a rank"):
        propose(TABLES, 4, play=play, memory=49 * MiB)
    assert len(set(play.played)) == len(play.played)
    assert not any("tp 2, accumulate" in each for each in play.played), "recompute, which needs less, did not fit"
    assert [each for each in play.played if "pp" in each] == ["pp 2 x tp 2, none", "pp 4, none"]


def test_what_is_too_large_by_its_weights_is_not_played() -> None:
    play = Players(usual)
    with pytest.raises(PlanError, match=r"weights, gradients and optimizer states alone take \d+\S* KiB a rank"):
        propose(TABLES, 4, play=play, memory=1024)
    assert play.played == []


def test_what_tables_give_is_played_once() -> None:
    play = Players(usual)
    given = {**TABLES, "mesh": {"dp_shard": 2, "tp": 2}, "run": {"accumulate": 1}, "memory": {"recompute": []}}
    with pytest.raises(PlanError, match="dp_shard 2 x tp 2 needs least, 200 MiB"):
        propose(given, 4, play=play, memory=150 * MiB)
    assert play.played == ["dp_shard 2 x tp 2, none"]


def test_experts_are_spread_over_as_many_ranks_as_the_model_allows() -> None:
    tables = {"model": {"config": "Qwen3MoeConfig", "overrides": {**SIZES, **EXPERTS}}}
    assert [propose(tables, ranks, play=Players(usual)).plan.mesh.ep for ranks in (2, 4, 8)] == [2, 4, 4]


def test_a_plan_that_can_not_be_played_has_its_training_bytes_and_the_reason() -> None:
    def refuse(plan: ParallelPlan) -> DryReport:
        raise NotImplementedError("aten::unknown has no kernel on meta\nand more")

    estimate = propose(TABLES, 2, play=refuse).estimate
    assert estimate.unplayed == "aten::unknown has no kernel on meta" and not estimate.by_kind
    assert propose(TABLES, 2, play=refuse, memory=estimate.total).estimate == estimate
    fewer = propose(TABLES, 4, play=refuse, memory=estimate.total - 1).estimate
    assert fewer.total < estimate.total


# ---- dry runs ----
def test_the_estimate_is_the_dry_runs_of_the_plan() -> None:
    first = propose(TABLES, 8, play=dry_run)
    report = dry_run(first.plan)
    assert first.estimate.total == report.peak and first.plan.mesh.axes == {"dp_shard": 8}
    assert sum(first.estimate.by_kind.values()) == report.peak + first.estimate.by_kind["host"]
    second = propose(TABLES, 8, play=dry_run, memory=report.peak - 1)
    assert second.plan == replace(first.plan, memory=replace(first.plan.memory, recompute=("model.layers.*",)))
    assert second.estimate.total < report.peak


def test_a_budget_is_not_played() -> None:
    estimate = propose({**TABLES, "memory": {"budget": "1GiB"}}, 2, play=dry_run).estimate
    assert estimate.unplayed.startswith("memory.budget: what is swapped and computed again to keep to it")
