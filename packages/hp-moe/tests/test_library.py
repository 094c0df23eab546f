"""Grouped products as an implementation of transformers' experts, chosen by name."""

from __future__ import annotations

import pytest
import torch
from moe_models import OWN, Float64, build, experts

from hp_moe import register_experts
from hp_moe.layer.experts import compute
from hp_moe.torch import modules
from hp_testing import device_type

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.framework("torch")


@pytest.mark.parametrize("family", OWN)
def test_grouped_products_equal_the_librarys_own(family, monkeypatch):
    calls = []
    monkeypatch.setattr(modules, "compute", lambda *inputs: calls.append(inputs[0]) or compute(*inputs))
    name = register_experts()
    eager, grouped = build(family).to(device_type()), build(family).to(device_type())
    forward = type(experts(grouped)[0]).forward
    grouped.set_experts_implementation(name)
    tokens = torch.randint(64, (3, 7), generator=torch.Generator().manual_seed(0)).to(device_type())
    with Float64():
        losses = [model(tokens, labels=tokens).loss for model in (eager, grouped)]
        for loss in losses:
            loss.backward()
    assert calls == experts(grouped)
    assert type(experts(grouped)[0]).forward is forward, "the library's own forward looks the name up"
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for (key, one), other in zip(eager.named_parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-13, msg=key)


def test_wrong_inputs_and_experts_that_the_library_spreads_are_refused():
    model = build("Qwen3MoeConfig").to(device_type())
    model.set_experts_implementation(register_experts())
    (module, *_) = experts(model)
    rows = torch.ones(2, 16, dtype=torch.float64, device=device_type())
    weights = torch.ones(2, 2, dtype=torch.float64, device=device_type())
    with pytest.raises(ValueError, match="Qwen3MoeExperts: 1 choices are none of 6 experts, whose numbers go from 0"):
        module(rows, torch.tensor([[0, 6], [1, 2]], device=device_type()), weights)
    with pytest.raises(ValueError, match="and 2 weights are not finite: look at the router"):
        nan = torch.tensor([[float("nan")] * 2, [1.0] * 2], dtype=torch.float64, device=device_type())
        module(rows, torch.tensor([[0, 5], [1, 2]], device=device_type()), nan)
    module._is_expert_parallel = True
    with pytest.raises(RuntimeError, match="transformers spreads these experts over ranks itself; take hp_moe.Expert"):
        module(rows, torch.tensor([[0, 5], [1, 2]], device=device_type()), weights)
    model.float().set_experts_implementation("grouped_mm")
    module(rows.float(), torch.tensor([[0, 5], [1, 6]], device=device_type()), weights.float())  # 6 is another rank's


def test_names_of_others_are_refused():
    assert register_experts() == register_experts() == "grouped_linear"
    for name in ("eager", "grouped_mm"):
        with pytest.raises(ValueError, match=f"register_experts: '{name}' is another implementation of transformers"):
            register_experts(name)
    assert register_experts("another name") == "another name"
