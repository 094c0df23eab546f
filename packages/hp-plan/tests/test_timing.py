"""Kernels and ranks that are timed on this machine: what is called, and not how long it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dry_plans import USUAL

from hp_plan import Hardware, ParallelPlan, dry_run, probe, tune
from hp_plan.torch.dry.ledger import kernel_key
from hp_plan.torch.timing.kernels import call_of, cold_sets, time_kernels
from hp_plan.torch.timing.probing import level_of
from hp_plan.torch.timing.ranks import time_steps
from hp_platform import get_platform
from hp_testing import device_type

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.skipif(device_type() != "cpu", reason="the kernels of these plans are those of the CPU"),
]
CPU = torch.device("cpu")
aten = torch.ops.aten

CALLS = {
    "product": (aten.mm.default, (torch.ones(2, 3), torch.ones(3, 4)), {}),
    "transposed": (aten.mm.default, (torch.ones(2, 3), torch.ones(4, 3).t()), {}),
    "expanded": (aten.mul.Tensor, (torch.ones(4, 3), torch.ones(3).expand(4, 3)), {}),
    "a list": (aten.cat.default, ([torch.ones(2), torch.ones(3)], 0), {}),
    "indices": (aten.embedding.default, (torch.ones(5, 2), torch.tensor([[1, 2], [3, 4]])), {}),
    "a dtype": (aten._to_copy.default, (torch.ones(2),), {"dtype": torch.bfloat16}),
    "numbers": (aten.clamp.default, (torch.ones(2), -1.5, float("inf")), {}),
    "a text": (aten.gelu.default, (torch.ones(2),), {"approximate": "tanh"}),
    "nothing": (aten.sum.dim_IntList, (torch.ones(2, 2), [1], True), {"dtype": None}),
    "a new tensor": (aten.zeros.default, ([2, 3],), {"dtype": torch.float32, "device": CPU}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_made_anew_from_its_key(name: str) -> None:
    func, args, kwargs = CALLS[name]
    key = kernel_key(func, args, kwargs)
    again, values, named = call_of(key, CPU)
    assert again is func and kernel_key(again, values, named) == key
    expected, got = func(*args, **kwargs), again(*values, **named)
    assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_offsets_of_a_grouped_product_share_out_its_rows() -> None:
    offsets = torch.tensor([4, 8], dtype=torch.int32)
    key = kernel_key(aten._grouped_mm.default, (torch.ones(8, 16), torch.ones(2, 16, 8), offsets), {})
    _, args, _ = call_of(key, CPU)
    assert args[2].tolist() == [4, 8]


def test_calls_go_round_sets_of_tensors_that_caches_do_not_hold() -> None:
    args, kwargs = [[torch.rand(1 << 20).as_strided((1 << 10, 1 << 10), (1, 1 << 10))], 2], {"out": torch.ones(3)}
    sets = cold_sets(args, kwargs)
    assert len(sets) == 8 and sets[0] == (args, kwargs)
    for (tensor,), number in (each for each, _ in sets[1:]):
        assert number == 2 and torch.equal(tensor, args[0][0]) and tensor.stride() == (1, 1 << 10)
    assert len({each[0][0].data_ptr() for each, _ in sets}) == 8
    assert len(cold_sets([torch.ones(1 << 24)], {})) == 1 and len(cold_sets([1], {})) == 1


def test_kernels_that_can_not_be_called_alone_are_left_out() -> None:
    good = kernel_key(aten.mm.default, (torch.ones(2, 3), torch.ones(3, 4)), {})
    seconds = time_kernels([good, "aten.mm.default(float32[2,3|3,1], float32[7,4|4,1])", "aten.none.default()"], 1)
    assert list(seconds) == [good] and seconds[good] > 0


@pytest.mark.parametrize("name", ["fsdp", pytest.param("ep", marks=pytest.mark.thorough)])
def test_all_kernels_of_a_plan_are_timed(name: str) -> None:
    keys = dry_run(ParallelPlan.from_dict(USUAL[name]), rank=0, kernels=True).ranks[0].trace.kernels
    missing = keys.keys() - time_kernels(keys, 1).keys()
    assert not missing


def test_a_level_is_found_from_the_seconds_of_its_gathers() -> None:
    sizes = [1 << power for power in (12, 14, 16, 18, 20, 22, 24)]
    level = level_of(4, [3 * 50e-6 + size * 3 / 4 / 2e9 for size in sizes])
    assert level.latency == pytest.approx(50e-6) and level.bandwidth == pytest.approx(2e9)


def test_a_machine_is_measured_and_kept(tmp_path: Path) -> None:
    measured = probe(2)
    assert measured.device == get_platform().devices.name() and measured.kind == "cpu"
    assert {"float32", "bfloat16"} <= measured.flops.keys()
    measured.write(tmp_path / "own.toml")
    assert Hardware.load(tmp_path / "own.toml") == measured
    with pytest.raises(ValueError, match="got 0 of them"):
        probe(0)


@pytest.mark.parametrize("name", ["fsdp", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("pp", "ep"))])
def test_steps_are_run_for_real(name: str) -> None:
    seconds = time_steps(ParallelPlan.from_dict(USUAL[name]), 2)
    assert seconds.clock > 0 and seconds.cpu > 0


def test_only_this_machine_is_measured() -> None:
    plan = ParallelPlan.from_dict(USUAL["fsdp"])
    with pytest.raises(ValueError, match="this machine is not it"):
        tune(plan, ranks=2, hardware="h100-8", measure=1)


@pytest.mark.thorough
def test_tune_measures_the_best_plans_of_this_machine() -> None:
    tables = {**USUAL["fsdp"], "mesh": {"pp": 1, "cp": 1}}
    config = {**tables["model"]["overrides"], "num_hidden_layers": 6}
    tables = {**tables, "model": {**tables["model"], "overrides": config}}
    found = tune(tables, ranks=2, free=(), top=3, measure=2)
    assert [each.measured is None for each in found.candidates] == [False, False, True]
    for each in found.candidates:
        assert max(rank.peak.live for rank in dry_run(each.plan).ranks) == each.memory
