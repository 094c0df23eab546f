"""Log-probabilities of given tokens: those of whole logits in one process, in any layout, with their gradients."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_plan import ParallelPlan, apply, build_model, build_parallel_model, log_probabilities
from hp_testing import device_type, on_ranks

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


def plan_of(family="Llama", dtype="float64", styles="auto", overrides=None, **mesh):
    table = {
        "model": {"config": f"{family}Config", "overrides": {**SIZES, **(overrides or {})}},
        "mesh": mesh,
        "data": {"sequence_length": 16},
        "run": {"dtype": dtype},
    }
    if mesh.get("tp", 1) > 1:
        table["styles"] = styles
    return ParallelPlan.from_dict(table)


def texts(rows=3, length=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (rows, length), generator=generator).to(device_type())


def of_whole_logits(model, ids, temperature, **inputs):
    logits = model(ids, use_cache=False, **inputs).logits[:, :-1] / temperature
    logs = logits.log_softmax(-1)
    return logs.gather(-1, ids[:, 1:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


LAYOUTS = [{"dp_shard": 2}, {"tp": 2}, {"tp": 2, "styles": "auto-sequence"}]


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["fsdp", "tp", "sequence"])
@pytest.mark.parametrize(
    "family, overrides",
    [("Llama", {}), ("Qwen3", {"tie_word_embeddings": True}), ("Gemma2", {}), ("Granite", {"logits_scaling": 3.0})],
)
def test_they_and_their_gradients_are_those_of_whole_logits(family, overrides, layout):
    plan = plan_of(family, overrides=overrides, **layout)
    alone = build_model(plan, device=device_type())
    model = apply(build_model(plan, device=device_type()), plan)
    ids = texts()
    expected, entropy = of_whole_logits(alone, ids, 0.7)
    (expected.sum() * 1.5 + entropy.sum()).backward()
    found = log_probabilities(model, ids, temperature=0.7, chunk=5)
    (found.log_probabilities.sum() * 1.5 + found.entropy.sum()).backward()
    torch.testing.assert_close(found.log_probabilities, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=1e-12)
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        # Gemma's norms compute in float32.
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        atol = 1e-6 if family == "Gemma2" else 1e-12
        torch.testing.assert_close(gradient, wanted[name].grad, rtol=0, atol=atol, msg=name)


@on_ranks(1)
def test_padding_is_left_out():
    model = build_model(plan_of(), device=device_type())
    ids = texts(2, 6)
    whole = log_probabilities(model, ids)
    for left in (True, False):
        padding = torch.zeros(2, 3, dtype=torch.long, device=ids.device)
        parts = [padding, ids] if left else [ids, padding]
        mask = torch.cat([torch.zeros_like(padding) if part is padding else torch.ones_like(ids) for part in parts], 1)
        found = log_probabilities(model, torch.cat(parts, 1), attention_mask=mask)
        own, rest = (slice(3, None), slice(0, 3)) if left else (slice(0, 5), slice(5, None))
        for value, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(value[:, own], expected, rtol=0, atol=1e-12)
            assert not value[:, rest].any()


@on_ranks(1)
@pytest.mark.parametrize("rows, length", [(2, 1), (0, 4)])
def test_nothing_to_predict(rows, length):
    model = build_model(plan_of(), device=device_type())
    ids = texts(2, 4)[:rows, :length]
    for value in log_probabilities(model, ids):
        assert value.shape == (rows, length - 1)
        assert value.dtype == torch.float64


class _Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        of_weight = isinstance(out, torch.Tensor) and out.shape == (SIZES["hidden_size"], 2003)
        if isinstance(out, torch.Tensor) and out.dim() and out.shape[-1] == 2003 and not of_weight:
            self.elements = max(self.elements, out.numel())
        return out


@on_ranks(1)
def test_logits_of_a_chunk_are_in_memory_and_no_more():
    model = build_model(plan_of(overrides={"vocab_size": 2003}), device=device_type())
    ids = texts(4, 33)
    with _Largest() as seen:
        sum(value.sum() for value in log_probabilities(model, ids, chunk=8)).backward()
    assert seen.elements == 8 * 2003


@on_ranks(1)
def test_what_a_model_does_to_its_logits_has_to_be_known():
    model = build_model(plan_of(), device=device_type())
    inner = model.forward

    def forward(*args, **options):
        output = inner(*args, **options)
        output.logits = output.logits * 1.25
        return output

    model.forward = forward
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM changes the logits of its head"):
        log_probabilities(model, texts())


@on_ranks(1)
def test_bad_arguments_are_refused():
    model, ids = build_model(plan_of(), device=device_type()), texts()
    for options, message in (
        ({"temperature": 0.0}, "temperature must be more than 0"),
        ({"chunk": 0}, "chunk must be at least 1 token"),
        ({"attention_mask": ids[:, 1:]}, r"attention_mask has shape \(3, 8\), and ids \(3, 9\)"),
    ):
        with pytest.raises(ValueError, match=message):
            log_probabilities(model, ids, **options)
    with pytest.raises(ValueError, match="integers of shape"):
        log_probabilities(model, ids.double())
    with pytest.raises(NotImplementedError, match="Linear has no head"):
        log_probabilities(torch.nn.Linear(2, 2), ids)


@on_ranks(1)
def test_what_no_backward_was_for_is_let_go():
    model = build_model(plan_of(), device=device_type())

    def live() -> int:
        gc.collect()
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    counts = []
    for _ in range(3):
        log_probabilities(model, texts()).log_probabilities.sum().backward()  # of the entropy there is none
        log_probabilities(model, texts())
        model.zero_grad()
        counts.append(live())
    assert counts[1] == counts[2]


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"cp": 2}], ids=["pp", "cp"])
def test_axes_that_cut_texts_are_refused(mesh):
    overrides = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = build_parallel_model(plan_of(overrides=overrides, **mesh))
    with pytest.raises(NotImplementedError, match=next(iter(mesh))):
        log_probabilities(model, texts())


@on_ranks(2)
def test_a_head_that_is_gathered_by_itself_is_refused():
    table = plan_of(dp_shard=2).to_dict() | {"fsdp": {"groups": ["model.layers.*", "lm_head"]}}
    model = build_parallel_model(ParallelPlan.from_dict(table))
    with pytest.raises(NotImplementedError, match="a group of fully_shard of its own"):
        log_probabilities(model, texts())
