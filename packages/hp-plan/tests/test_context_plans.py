"""A transformers model whose sequence is sharded by a plan does what it does in one process."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from hp_plan import ParallelPlan, PlanError, apply, build_model, lint, verify
from hp_plan.extend import data_parallel_rows
from hp_plan.torch.compared import Float64
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

TOLERANCE = 1e-10
LLAMA4 = {"no_rope_layers": [1, 0], "layer_types": ["full_attention", "full_attention"], "num_local_experts": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def small_plan(mesh, context=(), config="LlamaConfig", sections=(), **overrides) -> ParallelPlan:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    parts = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    sharded = mesh.get("cp", 1) * parts > 1
    return ParallelPlan.from_dict(
        {
            "model": {"config": config, "overrides": {**heads, **sizes, **overrides}},
            "mesh": mesh,
            "context": dict(context),
            "fsdp": {"groups": ["model.layers.*"]} if sharded else {},
            "data": {"batch_size": 2 * parts, "sequence_length": 8},
            "run": {"grad_clip": 0.5},
            **dict(sections),
        }
    )


def check(plan: ParallelPlan) -> None:
    result = verify(plan, tolerance=TOLERANCE)
    assert result.passed, f"{result.first} differs: {result.largest:.1e}"
    assert {"model.embed_tokens", "model.layers.1.self_attn.o_proj", "lm_head"} <= {row.module for row in result.rows}


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize("context", [{}, {"ulysses_degree": 1}, {"ulysses_degree": 1, "load_balance": False}], ids=str)
def test_two_ranks(context):
    check(small_plan({"cp": 2}, context))


@on_ranks(2)
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("Qwen3Config", {"tie_word_embeddings": True}),
        ("Qwen3MoeConfig", EXPERTS),
        ("Gemma2Config", {"sliding_window": 3, "attn_logit_softcapping": 0.5, "initializer_range": 0.3}),
        ("Gemma3TextConfig", {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
@pytest.mark.parametrize("degree", [1, 2])
def test_families(config, overrides, degree):
    check(small_plan({"cp": 2}, {"ulysses_degree": degree}, config, **overrides))


@on_ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}, {"cp": 2, "tp": 2}],
    ids=" x ".join,
)
def test_products(mesh):
    check(small_plan(mesh, {"ulysses_degree": 2}, "Qwen3Config"))


@on_ranks(4)
@pytest.mark.parametrize(
    "mesh",
    [
        {"cp": 2, "ep": 2, "dp_shard": 2},
        {"cp": 2, "dp_shard": 2, "ep": 4},
        {"cp": 4, "ep": 2},
        {"cp": 2, "tp": 2, "ep": 2},
    ],
    ids=str,
)
def test_experts_over_ranks_that_share_samples(mesh):
    check(small_plan(mesh, {"ulysses_degree": 2}, "Qwen3MoeConfig", **EXPERTS))


@on_ranks(2)
def test_mixtral():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    check(small_plan({"cp": 2, "ep": 2}, {"ulysses_degree": 1}, "MixtralConfig", **experts))


@on_ranks(4)
def test_heads_and_inner_rings():
    check(small_plan({"cp": 4}, {"ulysses_degree": 1, "inner_ring_degree": 2}))


@on_ranks(4)
def test_with_sequence_parallel():
    check(small_plan({"cp": 2, "tp": 2}, sections={"styles": "auto-sequence"}))


def padded(plan):
    """A batch whose samples have different lengths, and labels that leave tokens of all ranks out."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 24, (plan.data.batch_size, 8), generator=generator).to(device_type())
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    for row in range(len(tokens)):
        mask[row, 8 - 2 * row :] = 0
    labels[mask == 0] = -100
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def compare_gradients(plan, batch):
    """Compare the loss and the gradients of a batch under the plan with those of one process."""
    single = build_model(plan).to(device_type()).train()
    model = apply(copy.deepcopy(single), plan)
    rows = data_parallel_rows(plan)
    with Float64():
        expected = single(**batch).loss
        expected.backward()
        got = model(**{name: x[rows] if x.ndim else x for name, x in batch.items()}).loss
        got.backward()
    total = got.detach().clone()
    world = get_platform().groups.new_group(range(plan.mesh.world_size))
    get_platform().collectives.all_reduce(total, "avg", group=world)
    torch.testing.assert_close(total, expected.detach(), rtol=TOLERANCE, atol=0)
    for (name, p), q in zip(model.named_parameters(), single.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q[1].grad, rtol=1e-9, atol=TOLERANCE, msg=name)


@on_ranks(4)
def test_tokens_are_counted_over_all_ranks_that_have_others():
    plan = small_plan({"dp_shard": 2, "cp": 2}, sections={"run": {"dtype": "float64"}})
    compare_gradients(plan, padded(plan))


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["zbv", pytest.param("1f1b", marks=pytest.mark.thorough)])
def test_stages_of_a_pipeline(schedule):
    layers = 2 if schedule == "1f1b" else 4
    plan = small_plan({"pp": 2, "cp": 2}, sections={"pipeline": {"schedule": schedule}}, num_hidden_layers=layers)
    check(plan)


@on_ranks(2)
def test_packed_documents_and_the_callers_own_number_of_tokens():
    plan = small_plan({"cp": 2}, sections={"run": {"dtype": "float64"}})
    batch = padded(plan)
    del batch["attention_mask"]
    batch["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4], device=device_type()).expand(2, -1)
    compare_gradients(plan, batch)
    items = torch.tensor(7, device=device_type())
    compare_gradients(plan, {**batch, "num_items_in_batch": items})


@on_ranks(2)
def test_what_is_computed_of_the_loss_is_of_the_whole_sequences():
    plan = small_plan({"cp": 2}, sections={"run": {"dtype": "float64"}})
    single = build_model(plan).to(device_type()).train()
    model, batch = apply(copy.deepcopy(single), plan), padded(plan)
    with Float64():
        expected, got = single(**batch).loss ** 2, model(**batch).loss ** 2
        expected.backward()
        got.backward()
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=0)  # on each rank
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=TOLERANCE, msg=name)


@on_ranks(2)
def test_outputs_without_labels_are_whole():
    plan = small_plan({"cp": 2}, {"ulysses_degree": 1}, sections={"run": {"dtype": "float64"}})
    single = build_model(plan).to(device_type()).train()
    model = apply(copy.deepcopy(single), plan)
    tokens = padded(plan)["input_ids"]
    with Float64():
        results = [each(tokens, use_cache=False).logits for each in (single, model)]
        torch.testing.assert_close(results[1], results[0], rtol=TOLERANCE, atol=TOLERANCE)
        for logits in results:
            logits[:, 3:].square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=TOLERANCE, msg=name)


@on_ranks(2)
def test_logits_of_routers_without_labels_are_whole():
    plan = small_plan({"cp": 2}, config="Qwen3MoeConfig", sections={"run": {"dtype": "float64"}}, **EXPERTS)
    single = build_model(plan).to(device_type()).train()
    model = apply(copy.deepcopy(single), plan)
    batch = {name: value for name, value in padded(plan).items() if name != "labels"}
    with Float64():
        expected, got = (each(**batch, use_cache=False, output_router_logits=True) for each in (single, model))
        torch.testing.assert_close(got.router_logits, expected.router_logits, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(got.aux_loss, expected.aux_loss, rtol=TOLERANCE, atol=0)
        for each in (got, expected):
            routed = sum(logits[::3].square().mean() for logits in each.router_logits)
            (each.logits[:, 3:].square().mean() + each.aux_loss + routed).backward()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=TOLERANCE, msg=name)


@on_ranks(2)
def test_inputs_that_are_refused_on_all_ranks():
    plan = small_plan({"cp": 2})
    model = apply(build_model(plan).to(device_type()), plan)
    tokens = padded(plan)["input_ids"]
    refused = {
        "logits_to_keep = 1 chooses places": {"logits_to_keep": 1},
        r"an attention_mask of shape \(2, 1, 8, 8\); pass one of padding": {
            "attention_mask": tokens.new_ones(2, 1, 8, 8)
        },
        r"the input 'mm_mask' of shape \(2, 8\) may belong to tokens": {"mm_mask": tokens},
        r"must be \[batch, sequence, ...\] of one length, got lengths {'input_ids': 8, 'labels': 6}": {
            "labels": tokens[:, :6]
        },
        "a sequence of length 6 .* does not divide over 2 ranks, with load_balance into 4 chunks; pad it to 8": None,
        "cp: its 2 ranks are passed different inputs.*pass the same whole sequences": {
            "labels": tokens + get_platform().groups.rank()
        },
    }
    for text, options in refused.items():
        with pytest.raises((ValueError, NotImplementedError), match=text):
            model(tokens if options is not None else tokens[:, :6], **(options or {}))
    with pytest.raises(NotImplementedError, match="past_key_values is passed.*generate with a model without cp"):
        model.generate(tokens, max_new_tokens=2)


@on_ranks(4)
def test_inputs_that_some_ranks_refuse_are_an_error_of_all():
    """Those of one sample raised alone, and the others waited for their number of labels."""
    plan = small_plan({"dp_shard": 2, "cp": 2})
    model = apply(build_model(plan).to(device_type()), plan)
    tokens = torch.ones(2, 8, dtype=torch.int64, device=device_type())
    refusing = get_platform().groups.rank() < 2
    own = "a sequence of length 6 .* pad it to 8"
    text = own if refusing else f"cp: inputs are refused by rank 0: .*{own}; rank 1: "
    with pytest.raises(ValueError, match=text):
        model(tokens[:, :6] if refusing else tokens, labels=None if refusing else tokens)


@on_ranks(2)
def test_a_loss_that_the_model_computes_itself_is_refused():
    plan = small_plan({"cp": 2})
    model = apply(build_model(plan).to(device_type()), plan)
    tokens = padded(plan)["input_ids"]
    model._loss_function = lambda **options: options["logits"].sum()
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM does not pass shift_labels and num_items"):
        model(tokens, labels=tokens)


def faults(mesh, *args, ranks=None, **options):
    return [str(each) for each in lint(small_plan(mesh, *args, **options), ranks)]


def test_lint():
    assert faults({"cp": 2, "dp_shard": 2, "tp": 2}, ranks=8) == []
    assert faults({"tp": 2}, {"ulysses_degree": 2}) == [
        "context: ulysses_degree would have no effect: the mesh tp 2 has no cp axis; leave [context] out, or make "
        "mesh.cp at least 2"
    ]
    assert faults({"cp": 4}, {"ulysses_degree": 3}) == [
        "context.ulysses_degree: ulysses_degree = 3 does not divide the 4 ranks of the context axis; make it"
        " one of [1, 2, 4]"
    ]
    assert faults({"cp": 8}, {"ulysses_degree": 2, "inner_ring_degree": 3, "load_balance": False}) == [
        "context.inner_ring_degree: inner_ring_degree = 3 does not divide the 4 ranks of a ring, which ulysses_degree=2"
        " leaves; make it one of [1, 2, 4]"
    ]
    short = {"data": {"sequence_length": 6, "batch_size": 2}}
    assert faults({"cp": 2}, sections=short) == [
        "data.sequence_length: 6 tokens do not divide over cp 2 x 2 chunks (load_balance) = 4; make it 8"
    ]
    assert faults({"cp": 2}, {"load_balance": False}, sections=short) == []
    assert faults({"cp": 8}, {"load_balance": False}) == [
        "context.ulysses_degree: 4 query heads and 2 key/value heads do not divide over a Ulysses group of 8 ranks (the"
        " context axis has 8): query heads must be a multiple of the degree, key/value heads a multiple or a divisor of"
        " it; make it one of [1, 2, 4]"
    ]
    assert faults({"cp": 2}, attn_implementation="eager") == [
        "mesh.cp: cp = 2, but attention is computed by 'eager', and 'sdpa' is what can be spread over ranks; write"
        " attn_implementation = 'sdpa' in [model.overrides], or leave cp out"
    ]


def test_attention_that_gets_scattered_parts_of_a_sequence_is_refused():
    heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    latent = {**heads, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2}
    for styles, expected in (("auto-sequence", ["mesh.cp"]), ("auto", [])):
        plan = small_plan({"cp": 2, "tp": 2}, {"ulysses_degree": 1}, "DeepseekV3Config", **latent)
        found = lint(dataclasses.replace(plan, styles=styles))
        assert [each.key for each in found] == expected, found
    plan = small_plan({"cp": 2, "tp": 2})
    assert lint(dataclasses.replace(plan, styles="auto-sequence")) == ()


@pytest.mark.parametrize(
    ("config", "overrides", "text"),
    [
        ("MambaConfig", {}, "MambaForCausalLM has no attention whose forward takes an attention_mask"),
        (
            "Qwen3NextConfig",
            {**EXPERTS, "num_hidden_layers": 4},
            "model.layers.0 and 2 more, a Qwen3NextDecoderLayer, has no such attention",
        ),
        ("BertConfig", {"is_decoder": True}, "BertLMHeadModel"),
        ("LlamaConfig", {"attention_dropout": 0.1}, "write attention_dropout = 0.0 in [model.overrides], or leave cp"),
        ("Llama4TextConfig", LLAMA4, "attn_temperature_tuning scales queries by places that attention counts"),
    ],
)
def test_models_that_are_refused(config, overrides, text):
    diagnostics = [str(each) for each in lint(small_plan({"cp": 2}, (), config, **overrides)) if each.key == "mesh.cp"]
    assert any(text in each for each in diagnostics), diagnostics


def test_parts_of_an_encoder_and_a_decoder_are_refused():
    sizes = {
        f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    model = {"config": "BartConfig", "task": "seq2seq-lm", "overrides": {"vocab_size": 24, "d_model": 16, **sizes}}
    assert "BartForConditionalGeneration makes its decoder's inputs of what it is passed" in said(model)


def test_biases_by_distance_are_refused():
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    model = {"config": "FalconConfig", "overrides": sizes}
    assert "alibi = true adds a bias to attention by the distance of tokens" in said(model)


def said(model):
    return "\n".join(map(str, lint({"model": model, "mesh": {"cp": 2}, "data": {"sequence_length": 8}})))


@on_ranks(2)
def test_one_head_of_keys_for_all_of_queries():
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"config": "FalconConfig", "overrides": {**sizes, "multi_query": True, "alibi": False}}
    data = {"data": {"batch_size": 2, "sequence_length": 8}, "fsdp": {"groups": ["transformer.h.*"]}}
    for degree in (1, 2):
        plan = {"model": model, "mesh": {"cp": 2}, "context": {"ulysses_degree": degree}, **data}
        result = verify(ParallelPlan.from_dict(plan), tolerance=TOLERANCE)
        assert result.passed, result.first


@on_ranks(2)
def test_a_model_that_cannot_be_sharded_is_refused_by_apply():
    plan = ParallelPlan.from_dict({"mesh": {"cp": 2}})
    with pytest.raises(PlanError, match="cp = 2, but Linear has no attention whose forward takes an attention_mask"):
        apply(torch.nn.Linear(4, 4), plan)
