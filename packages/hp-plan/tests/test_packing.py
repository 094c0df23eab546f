"""Samples of several documents: which models compute each as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hp_plan import lint
from hp_plan.features.sequences import PACKING

pytestmark = pytest.mark.framework("torch")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LENGTHS = [[5, 7, 4], [1, 15], [16], [2, 3, 1, 8]]  # of the documents of each sample; the last has padding


def samples():
    """Tokens, labels and positions of four samples, and the documents alone."""
    random = np.random.default_rng(0)
    tokens, labels = np.zeros((4, 16), np.int64), np.full((4, 16), -100)
    positions, documents = np.zeros((4, 16), np.int64), []
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for length in lengths:
            document = random.integers(1, 64, length)
            documents.append(document)
            tokens[row, place : place + length] = document
            labels[row, place + 1 : place + length] = document[1:]
            positions[row, place : place + length] = np.arange(length)
            place += length
        positions[row, place:] = np.arange(16 - place)
    return tokens, labels, positions, documents


def plan_of(config="LlamaConfig", **sections):
    model = {"config": config, "overrides": {**SMALL, **sections.pop("overrides", {})}}
    data = {"sequence_length": 16, "batch_size": 4, "packing": True, "paths": ["corpus.bin"]}
    return {"model": model, "data": data, "run": {"dtype": "float64"}, **sections}


FAMILIES = {
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 4,
}


@pytest.mark.parametrize("family", PACKING)
def test_families_that_are_named_keep_documents_apart(family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed in this environment")
    tokens, _, positions, _ = samples()
    settings = {**SMALL, **FAMILIES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(
        family, **settings, eos_token_id=None, bos_token_id=None, experts_implementation="eager"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    inputs = {"input_ids": torch.from_numpy(tokens), "position_ids": torch.from_numpy(positions), "use_cache": False}
    with torch.no_grad():
        got = model(**inputs).logits
        for row, lengths in enumerate(LENGTHS):
            place = 0
            for length in lengths:
                part = slice(place, place + length)
                expected = model(input_ids=inputs["input_ids"][row : row + 1, part], use_cache=False).logits[0]
                torch.testing.assert_close(got[row, part], expected, rtol=1e-6, atol=1e-6)
                place += length


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"config": "OPTConfig"}, "data.packing: 'opt' is not tested to keep documents of a sample apart"),
        ({"overrides": {"attn_implementation": "flex_attention"}}, "attention is computed by 'flex_attention'"),
    ],
)
def test_plans_that_can_not_be_packed_are_refused(changes, expected):
    texts = [str(diagnostic) for diagnostic in lint(plan_of(**changes))]
    assert any(expected in text for text in texts), texts
    assert not any("data.packing" in str(diagnostic) for diagnostic in lint(plan_of()))
