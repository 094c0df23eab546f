"""What a model derives from the length, or from all tokens, under the axis cp: right, or refused in the first call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as t

from hp_plan import ParallelPlan, apply
from hp_plan.torch.compared import Float64
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

LENGTH = 16
SIZES: dict[str, Any] = {"vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2}
ROBERTA: dict[str, Any] = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 40, "is_decoder": True}
ROBERTA |= {"attention_probs_dropout_prob": 0.0}
OPT: dict[str, Any] = {**SIZES, "ffn_dim": 24, "max_position_embeddings": 40, "word_embed_proj_dim": 16}
BART: dict[str, Any] = {"vocab_size": 19, "d_model": 16, "max_position_embeddings": 40, "pad_token_id": 0}
BART |= {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 16))
}
ROPES = {
    "longrope": {"short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0], "original_max_position_embeddings": 10},
    "dynamic": {"factor": 4.0},
}


def ids() -> torch.Tensor:
    return torch.randint(3, 19, (2, LENGTH), generator=torch.Generator().manual_seed(0)).to(device_type())


def spread(one: torch.nn.Module, mesh: dict[str, int] | None = None) -> Any:
    plan = ParallelPlan.from_dict({"mesh": mesh or {"cp": 2}, "fsdp": {"groups": ["model.layers.*"]}})
    return apply(copy.deepcopy(one), plan)


def llama(**overrides: Any) -> Any:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**{**LLAMA, **overrides})).double().to(device_type())


@on_ranks(2)
@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_that_depend_on_the_length_are_those_of_the_whole(kind):
    one = llama(max_position_embeddings=10, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]})
    model = spread(one)
    for length in (LENGTH, 8, LENGTH):
        tokens = ids()[:, :length]
        torch.testing.assert_close(model(input_ids=tokens).logits, one(input_ids=tokens).logits, atol=1e-12, rtol=0)


@on_ranks(2)
@pytest.mark.parametrize(
    ("model", "config", "sizes", "first"),
    [
        ("RobertaForCausalLM", "RobertaConfig", ROBERTA, "roberta.embeddings.position_embeddings"),
        ("BartForCausalLM", "BartConfig", BART, "model.decoder.embed_positions"),
    ],
)
def test_positions_that_a_model_makes_itself_are_refused(model, config, sizes, first):
    torch.manual_seed(0)
    one = getattr(t, model)(getattr(t, config)(**sizes)).double().to(device_type())
    model = apply(one, ParallelPlan.from_dict({"mesh": {"cp": 2}}))
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=rf"computes something else of its part .* first in '{first}'"):
            model(input_ids=ids())


@on_ranks(2)
def test_padding_is_another_way_to_call_a_model():
    torch.manual_seed(0)
    one = t.OPTForCausalLM(t.OPTConfig(**OPT, dropout=0.0)).double().to(device_type())
    model = apply(copy.deepcopy(one), ParallelPlan.from_dict({"mesh": {"cp": 2}}))
    mask = torch.ones_like(ids())
    for options in ({}, {"attention_mask": mask}):
        expected = one(input_ids=ids(), **options).logits
        torch.testing.assert_close(model(input_ids=ids(), **options).logits, expected, atol=1e-12, rtol=0)
    mask[1, :5] = 0
    with pytest.raises(NotImplementedError, match=r"first in 'model.decoder.embed_positions'"):
        model(input_ids=ids(), attention_mask=mask)


@on_ranks(4)
def test_a_hook_that_reads_the_length_is_refused_on_all_ranks():
    model = spread(llama(), {"dp_shard": 2, "cp": 2})
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output / output.size(1))
    with pytest.raises(NotImplementedError, match=r"first in 'model.layers.1.input_layernorm'|first in 'model.norm'"):
        model(input_ids=ids().roll(get_platform().groups.rank() // 2))


def count(module, args, output):
    module.seen += 1


@on_ranks(2)
def test_the_comparison_leaves_nothing_behind():
    calls = []
    model, one = spread(llama()), llama()
    for each in (model, one):
        each.model.norm.register_buffer("seen", torch.zeros((), dtype=torch.float64, device=device_type()))
        each.model.norm.register_forward_hook(count)
    model.model.norm.register_forward_hook(lambda module, args, output: calls.append(module.training))
    torch.manual_seed(3)
    losses = [model(input_ids=ids(), labels=ids()).loss for _ in range(2)]
    drawn, modes = torch.rand(1), {each.training for each in model.modules()}
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1)) and modes == {True}
    assert calls == [False, False, True, True] and model.model.norm.seen == 2
    sum(losses).backward()
    (2 * one(input_ids=ids(), labels=ids()).loss).backward()
    for name, parameter in one.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=1e-6, msg=name)  # the loss is in float32


@on_ranks(2)
def test_a_model_that_counts_its_calls_is_warned_of():
    calls = []

    def scale(module, inputs, output):
        calls.append(1)
        return output * (1 + 0.01 * len(calls))

    one = llama()
    one.model.layers[1].mlp.register_forward_hook(scale)
    model = spread(one)
    with pytest.warns(UserWarning, match=r"something else each time that it is passed the same inputs, first in 'mod"):
        model(input_ids=ids())
    assert len(calls) == 4  # three of the comparison
    model(input_ids=ids())
    assert len(calls) == 5


@on_ranks(2)
def test_what_forward_writes_is_as_it_was_before_each_of_the_two_passes():
    one = llama()
    one.model.register_buffer("mean", torch.zeros((), dtype=torch.float64, device=device_type()))

    def keep(module, inputs, output):
        one.model.mean.lerp_(output.detach().square().mean(), 0.5)
        return output + one.model.mean

    one.model.layers[1].mlp.register_forward_hook(keep)
    model = apply(one, ParallelPlan.from_dict({"mesh": {"cp": 2}}))
    one.model.mean.fill_(1.0)
    with pytest.raises(NotImplementedError, match="first in 'model.norm': it derives something from"):
        model(input_ids=ids())
    assert model.model.mean == 1.0


@on_ranks(2)
@pytest.mark.parametrize("window", [3, 40])
def test_attention_that_caps_its_logits_is_compared(window):
    torch.manual_seed(0)
    sizes = {**LLAMA, "head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": window}
    one = t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, attn_logit_softcapping=0.5, attn_implementation="eager"))
    model = spread(one.to(device_type()).double(), {"cp": 2})
    mask = torch.ones_like(ids())
    mask[1, :5] = 0
    labels = ids().masked_fill(mask == 0, -100)
    batch = {"input_ids": ids(), "attention_mask": mask}
    with Float64():
        expected, got = one(**batch).logits, model(**batch).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-12, rtol=0)
        with pytest.raises(ValueError, match=r"cp: 1 label\(s\) are predicted by tokens of padding"):
            model(**batch, labels=labels)
        labels[1, 5] = -100
        torch.testing.assert_close(model(**batch, labels=labels).loss, one(**batch, labels=labels).loss)


def staged(one: torch.nn.Module, **sections) -> Any:
    tables = {"mesh": {"pp": 2, "cp": 2}, "pipeline": {"micro_batches": 2}, "run": {"dtype": "float64"}}
    tables["data"] = {"sequence_length": LENGTH, "batch_size": 2}
    return apply(copy.deepcopy(one), ParallelPlan.from_dict({**tables, **sections}))


@on_ranks(4)
def test_parts_are_compared_before_a_model_is_cut_into_stages():
    torch.manual_seed(0)
    bart = {name: size for name, size in BART.items() if not name.startswith("encoder")}
    with pytest.raises(NotImplementedError, match=r"cp: BartForCausalLM computes something else of its part"):
        staged(t.BartForCausalLM(t.BartConfig(**{**bart, "decoder_layers": 2})).double().to(device_type()))
    one = t.OPTForCausalLM(t.OPTConfig(**OPT)).double().to(device_type()).eval()
    hooks = [len(module._forward_hooks) for module in one.modules()]
    model, tokens = staged(one), ids()
    assert [len(module._forward_hooks) for module in one.modules()] == hooks
    losses = model.run(input_ids=tokens, labels=tokens)
    if losses:
        expected = one(input_ids=tokens, labels=tokens).loss
        total = torch.stack(losses).mean()
        torch.testing.assert_close(total.float(), expected.float())
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    with pytest.raises(NotImplementedError, match="first in 'model.decoder.embed_positions'"):
        model.run(input_ids=tokens, labels=tokens.masked_fill(mask == 0, -100), attention_mask=mask)
