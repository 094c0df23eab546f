"""From a model to a plan and back: what is traced is what a step holds, and what the plan says is what is freed."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("scipy", reason="plan_memory needs scipy, in hp-offload's extra plan")

from offload_models import gradients, net

from hp_offload import (
    CheckpointPolicy,
    MemoryPlan,
    MemoryPlanWarning,
    SwapManager,
    apply_memory_plan,
    plan_memory,
    trace_saved,
)
from hp_offload.planning import Blocks
from hp_platform.torch import heavy

KEEP, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self._known:
                self._known[storage._cdata] = weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
        return out

    def _gone(self, key, nbytes):
        del self._known[key]
        self.bytes -= nbytes


def held(model: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that live between forward and backward, the loss and its gradient apart."""
    gc.collect()
    with Live() as live:
        out = model(x)
        result = live.bytes - out.untyped_storage().nbytes()
        out.backward()
    return result


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 8, dtype=torch.float64).view(4, 8)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_what_is_traced_is_what_a_step_holds(dropout):
    model, x = net(4, dropout), batch()
    saved = trace_saved(model, (x,))
    assert sum(each.bytes for each in saved) == held(model, x)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_trace_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, random_before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    saved = trace_saved(model, (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_before) and model[0].weight.grad is None
    assert saved and all(each.needed_at >= each.made_at for each in saved)


def test_sites_are_the_same_in_every_trace():
    model = net(2)
    first, second = ([(each.site, each.bytes) for each in trace_saved(model, (batch(),))] for _ in range(2))
    assert first == second and len({site for site, _ in first}) == len(first)


@pytest.mark.parametrize("part", [*(pytest.param(part, marks=pytest.mark.thorough) for part in (0.9, 0.75)), 0.6])
@pytest.mark.parametrize("bandwidth", [0, 1e15])
def test_what_the_plan_says_is_what_is_freed(part, bandwidth):
    model, x = net(5, 0.25), batch()
    saved = trace_saved(model, (x,))
    total = sum(each.bytes for each in saved)
    plan = plan_memory(saved, int(part * total), bandwidth)
    assert plan.predicted_peak <= part * total
    assert plan.total(KEEP) < total and (bandwidth == 0) == (plan.total(SWAP) == 0)
    expected = gradients(model, 2)
    model.zero_grad()
    plain = held(model, x)
    apply_memory_plan(model, plan)
    assert all(map(torch.equal, gradients(model, 2), expected))
    assert plain - held(model, x) == plan.total(SWAP) + plan.total(RECOMPUTE), "from the second step on"
    assert [*model.state_dict()] == [*net(5).state_dict()]


@pytest.mark.parametrize("cases", [15, pytest.param(40, marks=pytest.mark.thorough)])
def test_random_plans_have_the_same_bits(cases):
    draw, model = random.Random(0), net(3, 0.25)
    saved = trace_saved(model, (batch(),))
    expected = gradients(model, 2)
    for case in range(cases):
        policies = {}
        for each in saved:
            movable = each.swappable and each.alias_of is None
            policies[each.site] = draw.choice([KEEP, SWAP, RECOMPUTE]) if movable else KEEP
        other = apply_memory_plan(copy.deepcopy(model), MemoryPlan(policies, 0, 0.0))
        assert all(map(torch.equal, gradients(other, 2), expected)), f"case {case}"


def test_products_that_are_kept_are_handed_back(monkeypatch):
    model = net(3, 0.0)
    saved = trace_saved(model, (batch(),))
    # What gelu saves is the output of `up`: kept, while all else of the block is computed again.
    kept = {each.site for each in saved if each.bytes == 4 * 16 * 8 and each.site.endswith("#0")}
    policies = {each.site: RECOMPUTE if each.swappable and each.site not in kept else KEEP for each in saved}
    expected = gradients(model, 2)
    apply_memory_plan(model, MemoryPlan(policies, 0, 0.0))
    shapes, native = [], heavy.F.linear
    monkeypatch.setattr(heavy.F, "linear", lambda *args: (shapes.append(tuple(args[1].shape)), native(*args))[1])
    assert all(map(torch.equal, gradients(model, 2), expected))
    assert shapes.count((16, 8)) == 3 * 2, "once a block and step"


def test_memory_stays_as_it_is_over_steps():
    model, x, manager = net(4), batch(), SwapManager()
    saved = trace_saved(model, (x,))
    apply_memory_plan(model, plan_memory(saved, int(0.7 * sum(each.bytes for each in saved)), 1e15))
    gradients(model, 2)
    gc.collect()
    counts = []
    for _ in range(3):
        gradients(model, 10)
        counts.append((manager.host_bytes, sum(type(each) is torch.Tensor for each in gc.get_objects())))
    assert counts[0] == counts[1] == counts[2]


def test_a_step_that_saves_more_than_its_plan_says_so():
    model, x = net(3), batch()
    saved = trace_saved(model, (x,))
    plan = plan_memory(saved, int(0.7 * sum(each.bytes for each in saved)), 1e15)
    apply_memory_plan(model, plan)
    model(x).backward()
    text = (
        r"second step under a plan of memory saves \+1\d\d% of what the plan counts: .* kept \(planned .*\), .* swapped"
        r".* Trace and plan with arguments of the shapes that training has"
    )
    with pytest.warns(MemoryPlanWarning, match=text):
        model(x.repeat(2, 1)).backward()
    model(x.repeat(2, 1)).backward()  # said once
    model, x = net(3), x.repeat(2, 1)
    saved = trace_saved(model, (x,))
    apply_memory_plan(model, plan_memory(saved, int(0.7 * sum(each.bytes for each in saved)), 1e15))
    for _ in range(3):
        model(x).backward()


class Peaks(Live):
    """Notes the most bytes that live in each block's backward, the second run of what is computed again apart."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peaks = [0] * len(model.blocks)
        self.block: int | None = None
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(lambda _, args, out, number=number: self.enter(out, number))

    def enter(self, out, number):
        if self.block is None:
            out.register_hook(lambda gradient: setattr(self, "block", number))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.block is not None and not torch.is_grad_enabled():
            self.peaks[self.block] = max(self.peaks[self.block], self.bytes)
        return out


def peaks(model: nn.Module, x: torch.Tensor) -> list[int]:
    gc.collect()
    for block in model.blocks:
        block._forward_hooks.clear()
    with Peaks(model) as live:
        model(x).backward()
    return live.peaks


@pytest.mark.parametrize("part", [*(pytest.param(part, marks=pytest.mark.thorough) for part in (0.8, 0.6)), 0.5])
@pytest.mark.parametrize("bandwidth", [0, 1e15])
def test_the_peak_inside_of_backward_falls_by_what_is_planned(part, bandwidth):
    model, x = net(5, 0.25), batch()
    saved = trace_saved(model, (x,))
    plan = plan_memory(saved, int(part * sum(each.bytes for each in saved)), bandwidth)
    plain, planned = copy.deepcopy(model), apply_memory_plan(copy.deepcopy(model), plan)
    for other in (plain, planned):
        gradients(other, 2)
        other.zero_grad()
    blocks = Blocks(saved)
    absent = [
        sum(
            each.bytes
            for number, each in enumerate(blocks.saved)
            if blocks.present(number, KEEP, blocks.names.index(f"blocks.{block}"))
            and not blocks.present(number, plan.policies[each.site], blocks.names.index(f"blocks.{block}"))
        )
        for block in range(5)
    ]
    before, after = peaks(plain, x), peaks(planned, x)
    assert [one - two for one, two in zip(before, after)] == absent and max(absent) > 0


# ---- bad input ----
def test_bad_input():
    model, x = net(2), batch()
    with pytest.raises(TypeError, match="trace_saved takes a module, got int"):
        trace_saved(3)
    with pytest.raises(TypeError, match="apply_memory_plan takes the MemoryPlan of plan_memory, got dict"):
        apply_memory_plan(model, {})
    with pytest.raises(ValueError, match=r"the model has no block 'block.0'; close: blocks.0, blocks.1. A block is a"):
        apply_memory_plan(model, MemoryPlan({"block.0.up#0": SWAP}, 0, 0.0))
    apply_memory_plan(net(2), MemoryPlan({"blocks.0.up#0": SWAP}, 0, 0.0))(x)
    silent = nn.Linear(8, 8)
    silent.register_forward_hook(lambda module, args, out: setattr(module, "out", out.sin()) or out.detach())
    with pytest.raises(ValueError, match="no tensor of the model's output requires gradients; pass loss="):
        trace_saved(silent, (x.float(),))
    assert trace_saved(silent, (x.float(),), loss=lambda out: silent.out.sum())
    with pytest.raises(
        ValueError, match=r"the block 'blocks.0' saves no 'blocks.0.up#7'; close: blocks.0.up#0"
    ) as error:
        apply_memory_plan(net(2), MemoryPlan({"blocks.0.up#7": RECOMPUTE}, 0, 0.0))(x)
    assert "trace the model as it is now, with inputs like these" in str(error.value)
    saved = trace_saved(model, (x,))
    assert all(map(torch.equal, gradients(apply_memory_plan(model, plan_memory(saved, 10**6, 0))), gradients(net(2))))


def test_a_block_that_runs_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x):
            return self.blocks[0](self.blocks[0](x))

    with pytest.raises(NotImplementedError, match="the block 'blocks.0' runs twice in a step"):
        trace_saved(Twice(), (torch.ones(2, 4),))
