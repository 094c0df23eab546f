"""A tensor parallel model generates what it generates in one process, with and without a key-value cache."""

from __future__ import annotations

import pytest
import torch

from hp_plan import ParallelPlan, apply, build_model
from hp_testing import device_type, on_ranks


@on_ranks(2, 3)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
@pytest.mark.parametrize("styles", ["auto", "auto-sequence"])
def test_greedy_generation_equals_one_process(family, styles, ranks):
    overrides = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 43,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 4,
        "initializer_range": 0.5,  # Far from ties between tokens.
    }
    if family == "Mistral":
        overrides["sliding_window"] = 6
    plan = ParallelPlan.from_dict(
        {
            "model": {"config": f"{family}Config", "overrides": overrides},
            "mesh": {"tp": ranks},
            "styles": styles,
            "data": {"sequence_length": 16},
            "run": {"dtype": "float64"},
        }
    )
    prompt = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], device=device_type())
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    expected = build_model(plan, device=device_type()).eval().generate(prompt, **options)
    model = apply(build_model(plan, device=device_type()), plan).eval()
    for use_cache in (True, False):
        written = model.generate(prompt, use_cache=use_cache, **options)
        assert type(written) is torch.Tensor
        assert written.tolist() == expected.tolist()
