"""A model that is made anew for a copy's state has what the copy does not hold."""

from __future__ import annotations

import pytest

from hp_plan import ParallelPlan, apply, build_model
from hp_plan.torch.extend import begin, finish
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


@on_ranks(1)
def test_parameters_that_a_model_freezes_itself_are_drawn():
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_num_experts": 4,
        "moe_k": 2,
    }
    plan = ParallelPlan.from_dict({"model": {"config": "Ernie4_5_MoeConfig", "overrides": sizes}})
    whole = build_model(plan, device=device_type())
    frozen = {name: each for name, each in whole.named_parameters() if not each.requires_grad}
    assert frozen
    rebuilt = finish(apply(begin(plan, weights=False), plan), plan, weights=False)
    found = dict(rebuilt.named_parameters())
    for name, value in frozen.items():
        whole = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
        assert whole.tolist() == value.tolist()
