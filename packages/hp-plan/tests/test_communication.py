"""`[communication]` and `[mesh] order`: what is refused, what is chosen, and what goes between hosts."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from dry_plans import plan_tables
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_plan import MeshSection, ParallelPlan, apply, build_model, dry_run, lint, order_axes, verify
from hp_plan.extend import data_parallel_rows, examine, traffic_notes
from hp_plan.features import communication
from hp_plan.features.communication import Spread, best_order, between_hosts, estimate, spread_of
from hp_platform import count_collectives, get_platform
from hp_platform.communication.carriers import carrier_of
from hp_platform.extend import set_transport
from hp_platform.port import port
from hp_testing import on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here"),
]


def test_examples():
    assert doctest.testmod(communication) == (0, doctest.testmod(communication).attempted)


def texts(mesh, **sections):
    tables = plan_tables(mesh, **{"data": {"batch_size": 16}, **sections})
    return [str(each) for each in lint(tables)]


HSDP = {"dp_replicate": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("mesh", "sections", "expected"),
    [
        (HSDP, {"communication": {"wire": {"dp_replicat": "bf16"}}}, "there is no axis 'dp_replicat'; did you mean"),
        (HSDP, {"communication": {"wire": {"tp": "bf16"}}}, "a wire carries the gradients that are reduced over"),
        (HSDP, {"communication": {"wire": {"dp_replicate": "int4"}}}, "got 'int4', expected one of bf16, e4m3, int8"),
        (HSDP, {"communication": {"wire": {"dp_replicate": 8}}}, "got 8, expected one of bf16, e4m3, int8"),
        ({"dp_shard": 2}, {"communication": {"wire": {"dp_replicate": "bf16"}}}, "there is one replica"),
        (
            {**HSDP, "ranks_per_host": 4},
            {"communication": {"wire": {"dp_replicate": "bf16"}}},
            "the ranks of dp_replicate are on one host, where encoding takes longer than sending; leave it out",
        ),
        (
            HSDP,
            {"communication": {"wire": {"dp_replicate": "bf16"}}, "run": {"deterministic": True}},
            "with run.deterministic, whose sums are exact",
        ),
        (
            HSDP,
            {"communication": {"wire": {"dp_replicate": "int8"}}, "fsdp": {"reduce_dtype": "float64"}},
            "gradients are reduced in float64, which it would round",
        ),
        (HSDP, {"communication": {"transport": "shm"}}, "expected one of auto, backend"),
        ({**HSDP, "order": "auto"}, {}, "got 'auto', but mesh.ranks_per_host is not given"),
        ({**HSDP, "order": "fast"}, {}, "got 'fast'"),
        ({**HSDP, "order": ["dp_shrad", "tp"]}, {}, "'dp_shrad' which is no axis: did you mean 'dp_shard'?"),
        ({"dp_shard": 2, "cp": 2, "order": ["cp", "dp_shard"]}, {}, "in ascending order; write dp_shard before cp"),
        ({"dp_shard": 2, "cp": 2, "order": ["dp_shard"]}, {}, "in ascending order; write dp_shard before cp"),
        ({**HSDP, "order": ["tp", "tp"]}, {}, "with 'tp' twice"),
        ({"pp": 2, "tp": 2, "order": ["tp", "pp"]}, {}, "ranks of a stage are neighbours; write each of"),
    ],
)
def test_what_is_refused(mesh, sections, expected):
    found = texts(mesh, **sections)
    assert any(expected in text for text in found), found


def test_an_order_with_experts_is_refused():
    tables = plan_tables({"dp_shard": 2, "tp": 2, "ep": 2, "order": ["tp", "dp_shard"]}, "experts")
    assert any("with mesh.ep = 2, which needs the usual order" in str(each) for each in lint(tables))


def test_a_wire_on_an_axis_that_is_moved_to_a_host_is_refused():
    # Four samples of four tokens: gradients of the replicas are most of what is sent.
    mesh = {"dp_replicate": 2, "tp": 2, "ranks_per_host": 2, "order": "auto"}
    sections = {"data": {"sequence_length": 4, "batch_size": 4}, "communication": {"wire": {"dp_replicate": "int8"}}}
    assert any("ranks of dp_replicate are on one host" in text for text in texts(mesh, **sections))
    assert texts({**mesh, "order": []}, **sections) == []


def test_nothing_is_wrong_with_wires_between_hosts():
    wired = {"communication": {"wire": {"dp_replicate": "bf16"}, "transport": "auto"}}
    assert texts({**HSDP, "ranks_per_host": 2}, **wired) == []
    assert texts({**HSDP, "ranks_per_host": 2, "order": ["dp_replicate", "dp_shard"]}, **wired) == []
    assert texts(HSDP, **wired) == []


# ---- where axes are ----
def test_places_follow_the_order():
    mesh = MeshSection(pp=2, dp_shard=2, tp=3, order=("pp", "tp", "dp_shard"))
    grid = mesh.rank_grid()
    assert grid.shape == (2, 2, 3) == tuple(mesh.axes.values())
    for rank in range(12):
        assert grid[tuple(mesh.coordinate(rank).values())] == rank
    assert mesh.coordinate(1) == {"pp": 0, "dp_shard": 1, "tp": 0}
    for partly in (("tp", "dp_shard"), ("pp", "tp", "cp", "dp_shard")):
        assert np.array_equal(dataclasses.replace(mesh, order=partly).rank_grid(), grid)
    assert dataclasses.replace(mesh, order=("dp_shard",)).coordinate(1) == {"pp": 0, "dp_shard": 1, "tp": 0}
    usual = MeshSection(pp=2, dp_shard=2, tp=3)
    assert np.array_equal(usual.rank_grid(), np.arange(12).reshape(2, 2, 3))


def test_an_order_that_was_not_chosen_is_not_used():
    with pytest.raises(RuntimeError, match=r"was not chosen yet: train plan = hp_plan.order_axes\(plan\)"):
        MeshSection(dp_shard=2, order="auto", ranks_per_host=1).coordinate(0)


def test_spreads():
    mesh = MeshSection(dp_replicate=2, dp_shard=3, tp=2, ranks_per_host=4)
    assert spread_of(mesh, ["tp"]) == Spread(2, 1, "host", True)
    assert spread_of(mesh, ["dp_replicate"]) == Spread(1, 2, "between", True)
    assert spread_of(mesh, ["dp_shard"]) == Spread(2, 2, "mixed", False)
    assert spread_of(mesh, ["dp_replicate", "dp_shard", "tp"]) == Spread(4, 3, "mixed", True)
    assert spread_of(MeshSection(tp=2), ["tp"]) is None


@settings(deadline=None, max_examples=40)
@given(
    st.fixed_dictionaries({name: st.integers(1, 4) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.integers(0, 1000), min_size=5, max_size=5),
)
def test_the_best_order_is_as_good_as_any(sizes, ranks_per_host, numbers):
    mesh = MeshSection(**sizes, ranks_per_host=ranks_per_host)
    sent = {axis: ("all_gather", float(number)) for axis, number in zip(mesh.axes, numbers)}
    best = best_order(mesh, sent)
    names = tuple(mesh.axes)
    assert sorted(best) == sorted(names) and ("pp" not in names or best[0] == "pp")
    orders = [order for order in itertools.permutations(names) if "pp" not in names or order[0] == "pp"]
    orders = [
        order for order in orders if not {"cp", "dp_shard"} <= set(order) or order.index("dp_shard") < order.index("cp")
    ]
    prices = {order: between_hosts(dataclasses.replace(mesh, order=order), sent) for order in orders}
    assert prices[best] == min(prices.values())
    if prices[names] == prices[best]:
        assert best == names


def test_the_chattiest_axis_stays_on_a_host():
    # Few tokens, so that gathers of weights are more than what tp reduces; tp then goes between hosts.
    tables = plan_tables(
        {"dp_shard": 2, "tp": 2, "ranks_per_host": 2, "order": "auto"}, data={"sequence_length": 4, "batch_size": 2}
    )
    plan = order_axes(ParallelPlan.from_dict(tables))
    assert plan.mesh.order == ("tp", "dp_shard")
    assert order_axes(plan) is plan
    report = examine(ParallelPlan.from_dict(tables), [])
    assert report.model is not None
    notes = traffic_notes(report.plan, report.model)
    assert notes[0].startswith("about dp_shard (host): ") and " 0 B of it from other hosts; through memory" in notes[0]
    assert (
        notes[1].startswith("about tp (between): ") and "through backend, as each rank is on another host" in notes[1]
    )
    assert notes[2].startswith("the axes are in the order tp, dp_shard: about ") and "in the usual order" in notes[2]
    many = plan_tables({**tables["mesh"]}, data={"sequence_length": 64, "batch_size": 512})
    assert order_axes(ParallelPlan.from_dict(many)).mesh.order == ("dp_shard", "tp")


def test_estimates_are_near_what_a_dry_run_counts():
    tables = plan_tables({"dp_shard": 2, "tp": 2, "ranks_per_host": 2})
    plan = ParallelPlan.from_dict(tables)
    report = examine(plan, [])
    assert report.model is not None
    told = estimate(plan, report.model)
    played = dry_run(plan)
    for each in played.traffic:
        if each.axes in (("dp_shard",), ("tp",)):
            spread = spread_of(plan.mesh, each.axes)
            assert spread is not None
            assert 0.4 < sum(spread.split(*told[each.axes[0]])) / (each.host + each.between) < 2.5
    text = " ".join(str(played).split())
    assert (
        "dp_shard (between): " in text
        and "tp (host): " in text
        and "through memory, as all ranks are on one host" in text
    )


def test_a_dry_run_tells_the_bytes_of_both_orders():
    played = dry_run(
        ParallelPlan.from_dict(plan_tables({"dp_shard": 2, "tp": 2, "ranks_per_host": 2, "order": ["tp", "dp_shard"]}))
    )
    levels = {each.axes: each.level for each in played.traffic}
    assert levels[("dp_shard",)] == "host" and levels[("tp",)] == "between"
    text = " ".join(str(played).split())
    assert " come from other hosts, " in text and " in the usual order of the axes" in text


# ---- on ranks ----
def fake_hosts(patch, hosts):
    patch.setattr(port().groups, "networks", lambda ranks: [f"host {hosts[rank]}" for rank in ranks])


def gradients_of(plan: ParallelPlan) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Take the gradients of a step under a plan, and what was called."""
    torch.manual_seed(3)
    model = apply(build_model(plan), plan)
    tokens = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))[data_parallel_rows(plan)]
    with count_collectives() as counts:
        model(input_ids=tokens, labels=tokens).loss.backward()
    gradients: dict[str, Any] = {name: each.grad for name, each in model.named_parameters()}
    found = {name: each.full_tensor() for name, each in gradients.items() if each is not None}
    return found, dict(counts)


@on_ranks(4)
@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 0.01), ("int8", 0.02), ("e4m3", 0.06)])
def test_gradients_travel_by_a_wire(dtype, limit, monkeypatch):
    fake_hosts(monkeypatch, [0, 0, 1, 1])
    plain = ParallelPlan.from_dict(plan_tables(HSDP))
    wired = ParallelPlan.from_dict(plan_tables(HSDP, communication={"wire": {"dp_replicate": dtype}}))
    expected, usual = gradients_of(plain)
    got, counts = gradients_of(wired)
    assert usual["all_reduce"] > counts.get("all_reduce", 0)
    assert counts["all_gather"] > usual["all_gather"]  # summands, in place of all-reduces
    assert got.keys() == expected.keys()
    one, other = (torch.cat([found[name].reshape(-1) for name in expected]) for found in (got, expected))
    assert 0 < (one - other).norm() <= limit * other.norm()


@on_ranks(4)
def test_a_wire_on_a_host_is_refused_on_all_ranks():
    plan = ParallelPlan.from_dict(plan_tables(HSDP, communication={"wire": {"dp_replicate": "bf16"}}))
    with pytest.raises(ValueError, match="the ranks of dp_replicate are on one host, where encoding takes longer"):
        apply(build_model(plan), plan)


@on_ranks(4)
def test_a_plan_with_a_wire_is_verified_without_it():
    plan = ParallelPlan.from_dict(plan_tables(HSDP, communication={"wire": {"dp_replicate": "bf16"}}))
    result = verify(plan, steps=1)
    assert result.passed
    assert "gradients between replicas were sent as they are, without [communication] wire" in result.notes


@on_ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2, "tp": 2, "order": ["tp", "dp_shard"]},
        {"dp_replicate": 2, "cp": 2, "order": ["cp", "dp_replicate"]},
        {"dp_shard": 2, "cp": 2, "order": ["dp_shard", "cp"]},
    ],
)
def test_plans_with_an_order_are_right(mesh):
    plan = ParallelPlan.from_dict(plan_tables(mesh))
    assert verify(plan, steps=1).passed


@on_ranks(2)
def test_the_backend_carries_what_a_plan_leaves_to_it():
    group = get_platform().groups.default_group()
    before = carrier_of(group)
    try:
        plan = ParallelPlan.from_dict(plan_tables({"dp_shard": 2}, communication={"transport": "backend"}))
        apply(build_model(plan), plan)
        assert before is not None and carrier_of(group) is None
    finally:
        set_transport("auto")
    assert carrier_of(group) is before
