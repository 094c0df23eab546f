"""A dry run says what is in the host's memory, and steps of eight bits; it refuses a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dry_plans import EIGHT_BITS, HOST, HOST_THOROUGH, measured, told

from hp_offload import SwapManager
from hp_plan import ParallelPlan, PlanError, dry_run
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.dry.playing import dry
from hp_plan.torch.dry.reading import report_of
from hp_platform.torch.devices import empty_on_host
from hp_platform.torch.dry import dry_world
from hp_testing import device_type, run_ranks
from hp_testing.pools.pool import close_pool

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="bytes of real ranks are counted on the CPU"),
]


def quietly(tables: dict[str, Any]) -> dict[str, Any]:
    """Measure what torch compiles: its compiler's imports warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        return measured(tables)


def compare(tables: dict[str, Any], measure: Callable[..., Any] = measured) -> list[dict[str, Any]]:
    """Assert that ranks measure what a dry run says, and return what it says."""
    world = math.prod(size for axis, size in tables["mesh"].items() if axis != "ep")
    close_pool(world)  # ranks that ran before have buffers that they use again
    real = run_ranks(world, measure, tables)
    said = {each.rank: told(each) for each in dry_run(ParallelPlan.from_dict(tables)).ranks}
    assert said == {rank: real[rank] for rank in said}
    return list(said.values())


@pytest.mark.parametrize(
    "tables",
    [
        *(pytest.param(each, id=name) for name, each in HOST.items()),
        *(pytest.param(each, id=name, marks=pytest.mark.thorough) for name, each in HOST_THOROUGH.items()),
    ],
)
def test_real_ranks_have_on_the_host_what_a_dry_run_says(tables: dict[str, Any]) -> None:
    assert all(each["host"] > 0 for each in compare(tables))


@pytest.mark.thorough
def test_real_ranks_hold_states_of_eight_bits_as_a_dry_run_says() -> None:
    compare(EIGHT_BITS, quietly)


def test_the_host_is_not_in_the_peak() -> None:
    reports = {}
    for name in ("swap", "offload", "swap_slices", "homes alone"):
        with dry(ParallelPlan.from_dict(HOST[name]), 0) as played:
            reports[name] = report_of(played, 0, memory=True)
    for report in reports.values():
        peak = report.peak
        assert peak.live == sum(peak.by_kind.values()) - peak.by_kind["host"] == max(report.trace.live)
        assert 0 < peak.by_kind["host"] <= report.host and max(report.memory["host"]) == report.host
        assert all(held.kind != "host" for held in peak.top)
    offload = reports["offload"].peak.by_kind
    assert offload["gradients"] == offload["states"] == 0, "they are where their weights are"
    assert SwapManager().host_bytes == 0, "another run has buffers of its own"


def test_a_budget_is_refused() -> None:
    plan = ParallelPlan.from_dict({**HOST["swap"], "memory": {"budget": "1GiB"}})
    with pytest.raises(PlanError, match=r"memory.budget: .* measured seconds.*; write memory.recompute or memory.swap"):
        dry_run(plan)


def test_a_ledger_knows_what_is_allocated_on_the_host() -> None:
    with Ledger(("cpu",)) as ledger:
        ledger.begin("forward")
        own = empty_on_host(64, torch.float32)
        other = torch.ones(16)
        assert [held.on_host for held in ledger.storages] == [True, False] and ledger.live == 320
    assert own.device == other.device == torch.device("cpu")
    with dry_world(2, 0):
        assert empty_on_host(64, torch.float32).is_meta
