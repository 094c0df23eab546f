"""The memory that a plan needs on a rank at the least, and what a device has."""

from __future__ import annotations

import pytest

from hp_plan import ParallelPlan
from hp_plan.linting import least_memory, memory_shortage
from hp_plan.structure.outline import ModelOutline
from hp_platform import get_platform

pytestmark = pytest.mark.framework("torch")  # the devices' roles are PyTorch's


def test_memory_that_a_rank_needs_at_the_least():
    model = ModelOutline({}, elements=1000, trained=600)

    def least(**sections):
        return least_memory(ParallelPlan.from_dict(sections), model)

    assert least() == 4 * (1000 + 3 * 600)
    assert least(mesh={"dp_shard": 2, "dp_replicate": 2}) == 4 * (1000 + 3 * 600) // 2
    assert least(mesh={"dp_shard": 4, "tp": 4}) == 4 * 1000, "each rank builds the whole model before it is cut"
    assert least(optimizer={"name": "muon"}) == 4 * (1000 + 3 * 600), "no hidden matrices here"
    assert least(optimizer={"swap_slices": 12}) == 4 * (1000 + 1.5 * 600), "three slices of twelve"
    assert least(optimizer={"name": "adamw8bit"}) == int(1000 + 600 * (1 + 2.03 / 4)) * 4
    assert least(optimizer={"name": "sgd"}, run={"dtype": "float64"}) == 8 * (1000 + 600)
    assert least(optimizer={"name": "sgd", "momentum": 0.9}, run={"dtype": "bfloat16"}) == 2 * (1000 + 2 * 600)


@pytest.mark.parametrize(
    ("kind", "memory", "expected"),
    [
        ("cpu", 13_000, "but this machine, for 2 ranks, has 0.0 MB"),
        ("cuda", 6_000, "but its cuda device has 0.0 MB"),
        ("cuda", 7_000, None),
        ("cpu", 15_000, None),
        ("npu", None, None),
    ],
)
def test_a_plan_that_is_too_large_for_the_device(monkeypatch, kind, memory, expected):
    devices = type(get_platform().devices)
    monkeypatch.setattr(devices, "kind", kind)
    monkeypatch.setattr(devices, "total_memory", lambda self: memory)
    plan = ParallelPlan.from_dict({"mesh": {"dp_shard": 2}})
    text = memory_shortage(plan, ModelOutline({}, elements=1000, trained=800), 2)
    assert (text is None) == (expected is None)
    if text is not None:
        assert text.startswith(
            "1,000 parameters in float32 need at least 0.0 MB of memory per rank for weights, gradients"
        )
        assert text.endswith(expected)
