"""[memory] of a plan: a model that nobody changed keeps to a budget, with the same bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("scipy", reason="a budget needs scipy, which hp-plan depends on")

import hp_offload
from hp_offload import SwapManager, trace_saved
from hp_optim import AdamW8bit
from hp_plan import MemorySection, ParallelPlan, PlanError, apply, build_model, build_optimizer, lint, verify
from hp_plan.port import models
from hp_plan.structure.memory import training_bytes
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MESHES = {"fsdp": {"mesh": {"dp_shard": 2}, "fsdp": {"groups": ["model.layers.*"]}}, "tp": {"mesh": {"tp": 2}}}


def llama(**sections) -> ParallelPlan:
    return ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": SMALL}, **sections})


@on_ranks(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_an_unmodified_model_keeps_to_its_budget(mesh) -> None:
    plan = llama(**MESHES[mesh])
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    plain = apply(build_model(plan, device=device_type()), plan)
    saved = trace_saved(plain, (), {"input_ids": tokens, "labels": tokens})
    movable = sum(each.bytes for each in saved if each.swappable)
    assert movable > 0.5 * sum(each.bytes for each in saved), "attention, products and activations of the layers"
    activations = sum(each.bytes for each in saved) - movable // 2
    static = training_bytes(plan, models().outline(build_model(plan, device="meta")))
    budget = llama(**MESHES[mesh], memory={"budget": f"{activations + static} B", "bandwidth": 1e15})
    model = apply(build_model(budget, device=device_type()), budget)
    for _ in range(3):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            loss = each(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        gradients = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            got, expected = (getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in (parameter, gradients[name]))
            assert torch.equal(got, expected), name
    assert SwapManager().host_bytes > 0


def test_budgets_of_plans(tmp_path):
    assert llama(memory={"budget": "20GiB"}).memory == MemorySection(budget="20GiB", bandwidth=25e9)
    (path := tmp_path / "plan.toml").write_text(llama(memory={"budget": "20 gigs"}).to_toml())
    found = [each for each in lint(path) if each.key == "memory.budget"]
    assert len(found) == 1 and "got '20 gigs', expected a number and a unit (GiB, MiB" in found[0].message


@on_ranks(1)
def test_a_budget_for_the_weights_alone_is_refused() -> None:
    plan = llama(memory={"budget": "1KiB"})
    with pytest.raises(
        PlanError, match=r"got 1KiB, and weights, gradients and optimizer states take .* of it on each rank"
    ):
        apply(build_model(plan), plan)
    assert [each.key for each in lint(plan)] == ["memory.budget"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_on_the_host_share_the_streams_of_activations(name) -> None:
    losses = []
    for slices in (0, 3):
        larger = {"config": "LlamaConfig", "overrides": {**SMALL, "hidden_size": 64}}
        plan = llama(optimizer={"name": name, "swap_slices": slices}, model=larger)
        torch.manual_seed(0)
        model = build_model(plan).to(device_type())
        optimizer = build_optimizer(plan, model.named_parameters())
        tokens = torch.arange(16, device=device_type()).view(2, 8)
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            with SwapManager().record() as log:
                optimizer.step()
        losses.append(loss)
        assert {what for what, _ in log} == ({"load", "update", "store"} if slices else set())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)  # torch's AdamW against ours


def test_states_of_eight_bits() -> None:
    plan = llama(optimizer={"name": "adamw8bit", "lr": 0.01})
    optimizer = build_optimizer(plan, build_model(plan).named_parameters())
    with pytest.raises(PlanError, match="optimizer.swap_slices: the states of sgd can't be on the host"):
        build_optimizer(llama(optimizer={"name": "sgd", "swap_slices": 2}), build_model(plan).named_parameters())
    assert isinstance(optimizer, AdamW8bit) and optimizer.param_groups[0]["lr"] == 0.01


@on_ranks(2)
def test_verify_keeps_to_the_budget(monkeypatch) -> None:
    sections = {**MESHES["tp"], "data": {"batch_size": 2, "sequence_length": 8}}
    plan, budgets = llama(**sections), []
    fit = hp_offload.fit_memory

    def noted(model, budget, **options):
        budgets.append(budget)
        return fit(model, budget, **options)

    monkeypatch.setattr(hp_offload, "fit_memory", noted)
    static = training_bytes(plan, models().outline(build_model(plan, device="meta")))
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    saved = trace_saved(apply(build_model(plan, device=device_type()), plan), (), {"input_ids": tokens})
    total = sum(each.bytes for each in saved)
    budget = static + total - sum(each.bytes for each in saved if each.swappable) // 3
    result = verify(
        llama(**MESHES["tp"], data={"batch_size": 2, "sequence_length": 8}, memory={"budget": f"{budget} B"})
    )
    assert result.passed and budgets == [2 * (budget - static)]
