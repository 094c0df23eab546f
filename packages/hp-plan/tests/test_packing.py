"""Samples of several documents: each is computed as if it were alone, and each label counts once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hp_dtensor import DTensor
from hp_plan import ParallelPlan, apply, build_model, lint
from hp_plan.packing import PACKING
from hp_plan.torch.extend import backward_loss
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

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


def alone(model, documents):
    """The loss over each document alone, each label counted once, with its gradients."""
    count = sum(len(document) - 1 for document in documents)
    total = 0.0
    for document in documents:
        if len(document) > 1:
            tokens = torch.from_numpy(document)[None].to(device_type())
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
    return total


def loss_in_float64(logits, labels, vocab_size, num_items_in_batch, **_):
    """The loss of transformers, which takes it in float32."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    total = torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), reduction="sum")
    return total / num_items_in_batch


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}])
def test_packed_samples_have_the_loss_and_gradients_of_their_documents_alone(mesh):
    tokens, labels, positions, documents = samples()
    fsdp = {"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}
    plan = ParallelPlan.from_dict(plan_of(mesh=mesh, **fsdp))
    device = device_type()
    single = build_model(plan, device=device)
    expected = alone(single, documents)
    whole = build_model(plan, device=device)
    whole.loss_function = loss_in_float64
    model = apply(whole, plan)
    rank = get_platform().groups.rank()
    rows = slice(2 * rank, 2 * rank + 2) if "dp_shard" in mesh else slice(None)  # with 16 and 24 labels
    inputs = [torch.from_numpy(array[rows]).to(device) for array in (tokens, labels, positions)]
    packed = {"labels": inputs[1], "position_ids": inputs[2]}
    loss = torch.tensor(backward_loss(plan, model, inputs[0], packed), dtype=torch.float64, device=device)
    get_platform().collectives.all_reduce(loss, group=get_platform().groups.default_group())
    assert loss.item() / 2 == pytest.approx(expected, rel=1e-12)
    for (name, got), (_, wanted) in zip(model.named_parameters(), single.named_parameters(), strict=True):
        gradient = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        torch.testing.assert_close(gradient, wanted.grad, rtol=1e-10, atol=1e-12, msg=name)


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
        ({"mesh": {"pp": 2}}, "data.packing: samples of several documents, but with pp = 2 none is supported"),
        ({"mesh": {"cp": 2}, "fsdp": {"groups": ["model.layers.*"]}}, "with cp = 2 none is supported"),
        ({"overrides": {"attn_implementation": "flex_attention"}}, "attention is computed by 'flex_attention'"),
    ],
)
def test_plans_that_can_not_be_packed_are_refused(changes, expected):
    texts = [str(diagnostic) for diagnostic in lint(plan_of(**changes))]
    assert any(expected in text for text in texts), texts
    assert not any("data.packing" in str(diagnostic) for diagnostic in lint(plan_of()))
