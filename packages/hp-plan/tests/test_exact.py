"""`[run] generation = "exact"`: a token's bits in training and in generation, beside any others."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hp_plan import ParallelPlan, PlanError, apply, build_model, generating, log_probabilities
from hp_plan.torch.generation.exact.forward import make_exact
from hp_plan.torch.generation.exact.rows import by_rows, cancelling
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.skipif(device_type() != "cpu", reason="refused by name elsewhere")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.5,
    "eos_token_id": 5,
    "pad_token_id": 0,
}
FAMILIES = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 6, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 2.0},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
}
NEW, LENGTHS = 66, (3, 9, 1, 5, 20, 2)  # of new tokens, more than a block of keys, and of prompts


def plan_of(family="Llama", dtype="float32", run=None, **tables):
    model = {"config": f"{family}Config", "overrides": SIZES | FAMILIES[family]}
    run = {"dtype": dtype, "deterministic": True, "generation": "exact", **(run or {})}
    return ParallelPlan.from_dict({"model": model, "data": {"sequence_length": 96}, "run": run, **tables})


def exact_model(family="Llama", dtype="float32"):
    model = build_model(plan_of(family, dtype))
    make_exact(model)
    return model


def prompts(rows):
    """Padded on the left."""
    generator, width = torch.Generator().manual_seed(2), max(LENGTHS[row] for row in rows)
    texts = [torch.randint(6, 37, (length,), generator=generator) for length in LENGTHS]
    ids = torch.stack([torch.nn.functional.pad(texts[row], (width - len(texts[row]), 0)) for row in rows])
    return ids, (ids != 0).long()


def generate(model, rows, **options):
    ids, mask = prompts(rows)
    options = {"max_new_tokens": NEW, "do_sample": True, "samples": rows, **options}
    with generating(model, seed=3) as generation:
        texts = model.generate(ids, attention_mask=mask, **options)
        report = generation.report()
    return texts, mask, generation, report


def whole(model, texts, mask, *, right=False, **options):
    """Log-probabilities of one forward of whole texts, of their new tokens, and by `log_probabilities`."""
    start = mask.shape[1]
    mask = torch.cat([mask, mask.new_ones((len(mask), texts.shape[1] - start))], 1)
    if right:
        width = texts.shape[1] + 3
        rows = [row[kept.bool()] for row, kept in zip(texts, mask, strict=True)]
        texts = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
        mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
    found = log_probabilities(model, texts, attention_mask=mask, **options).log_probabilities
    if right:
        return torch.stack([row[kept[1:].bool()][-NEW:] for row, kept in zip(found, mask, strict=True)])
    return found[:, start - 1 :]


@on_ranks(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_the_same_bits_in_training_and_generation_beside_any_others(family, dtype):
    model = apply(build_model(plan_of(family, dtype)), plan_of(family, dtype))
    options = {"eos_token_id": None}
    texts, mask, generation, report = generate(model, range(6), **options)
    assert report.equal == 1.0 and report.largest == 0.0
    expected = generation.log_probabilities
    assert len(set(expected.flatten().tolist())) > 100
    for row in range(6):  # alone, and without padding
        text, _, one, _ = generate(model, [row], **options)
        assert text[0, -NEW:].equal(texts[row, -NEW:])
        assert one.log_probabilities[0].equal(expected[row])
    for rows in ([4, 0, 2], [1, 3]):  # beside others, with other padding
        assert generate(model, rows, **options)[2].log_probabilities.equal(expected[rows])
    assert model.training
    for right in (False, True):
        for chunk in (7, 1024):
            assert whole(model, texts, mask, right=right, chunk=chunk).equal(expected)
    for row in range(6):
        assert whole(model, texts[row : row + 1], mask[row : row + 1], right=True).equal(expected[row : row + 1])
    for row in (0, 4):  # the logits of a plain forward
        text = texts[row, mask.shape[1] - LENGTHS[row] :][None]
        logits = model(text).logits[:, LENGTHS[row] - 1 : -1].float()
        chosen = logits.gather(-1, text[:, LENGTHS[row] :, None])[0, :, 0]
        assert (chosen - by_rows(logits[0], lambda rows: rows.logsumexp(-1, keepdim=True), "sums")[:, 0]).equal(
            expected[row]
        )


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=["fsdp", "dp"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Mixtral"])
def test_ranks_have_the_bits_of_one_process(family, mesh, dtype):
    texts, mask, one, _ = generate(exact_model(family, dtype), range(6))
    recompute = {"memory": {"recompute": ["model.layers.*"]}} if family != "Gemma2" else {}
    plan = plan_of(family, dtype, mesh=mesh, **recompute)
    model = apply(build_model(plan), plan)
    rank = get_platform().groups.rank()
    own = [3, 0, 5, 1] if rank else [4, 2]
    found, _, generation, report = generate(model, own)
    length = min(found.shape[1] - prompts(own)[0].shape[1], texts.shape[1] - mask.shape[1])
    assert generation.log_probabilities[:, :length].equal(one.log_probabilities[own, :length])
    assert report.equal == 1.0
    # The first update: nothing has been computed again.
    new = generation.log_probabilities
    text_mask = torch.cat([prompts(own)[1], generation.counts.long()], 1)
    now = log_probabilities(model, found, attention_mask=text_mask).log_probabilities[:, -new.shape[1] :]
    ratio = (now - new).exp()
    assert bool((ratio == 1).all())
    ratio[generation.counts].mean().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@on_ranks(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_plain_model(family):
    plan = plan_of(family, run={"deterministic": False, "generation": "plain"})
    plain, exact = build_model(plan).double(), build_model(plan).double()
    plain.load_state_dict(exact.state_dict())
    make_exact(exact)
    ids = torch.randint(6, 37, (3, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    labels = torch.where(mask.bool(), ids, -100)
    for model in (plain, exact):
        if hasattr(model.config, "_experts_implementation"):
            model.set_experts_implementation("eager")
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, found), expected in zip(exact.named_parameters(), plain.parameters(), strict=True):
        # transformers' own softmax of Gemma 2's attention and of routers is in float32.
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(1)
def test_places_are_counted_from_the_first_token():
    model = exact_model()
    ids, mask = prompts(range(6))
    expected = model(ids[0:1, -3:]).logits
    assert model(ids, attention_mask=mask).logits[0:1, -3:].equal(expected)
    assert model(ids, mask).logits[0:1, -3:].equal(expected)
    with pytest.raises(NotImplementedError, match="do not count 0, 1, 2"):
        model(ids[:1], position_ids=torch.tensor([[*range(10), *range(10)]]))
    with pytest.raises(NotImplementedError, match="do not count 0, 1, 2"):
        model(ids[:1], position_ids=torch.arange(20)[None] + 1)


@on_ranks(1)
def test_what_is_not_exact_is_refused_by_name():
    model = exact_model()
    ids, mask = prompts([1])
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(NotImplementedError, match="a cache of the type StaticCache"):
        model(ids, past_key_values=cache)
    model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(NotImplementedError, match=r"attention_mask must be \(batch, length\)"):
        model(ids, attention_mask=mask[:, None, None])
    with pytest.raises(NotImplementedError, match="padding between tokens of a text"):
        model(ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]]))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(NotImplementedError, match="autocast is not supported"),
    ):
        model(ids)

    with pytest.raises(NotImplementedError, match="must be float32 or bfloat16"), generating(exact_model().double()):
        pass
    with pytest.raises(NotImplementedError, match=r"model.embed_tokens.weight is torch.float16; build the model in"):
        make_exact(build_model(plan_of()).half())

    class Mixing(torch.nn.Module):
        def forward(self, hidden):
            return hidden @ hidden.transpose(-1, -2) @ hidden

    model.model.norm = Mixing()
    with pytest.raises(NotImplementedError, match="model.norm joined the model after apply"), generating(model):
        pass
    model = build_model(plan_of())
    model.model.norm = Mixing()
    make_exact(model)
    with pytest.raises(NotImplementedError, match=r"calls \w+ of \[\(1, 9, 24\), \(1, 24, 9\)\], which is not known"):
        model(ids)


REFUSED = {
    "tp": ({"mesh": {"tp": 2}, "styles": "auto"}, {}, "mesh.tp = 2, whose ranks add up parts of a product"),
    "cp": ({"mesh": {"cp": 2}}, {}, "mesh.cp = 2"),
    "pp": ({"mesh": {"pp": 2}}, {}, "mesh.pp = 2"),
    "chance": ({}, {"deterministic": False}, "run.deterministic = false"),
    "float64": ({}, {"dtype": "float64"}, "run.dtype = 'float64'"),
    "compiled": ({"compile": {"blocks": ["model.layers.*"]}}, {}, "compile.blocks"),
    "budget": ({"memory": {"budget": "1GiB"}}, {}, "memory.budget"),
    "adapter": ({"adapter": {"kind": "lora"}}, {}, "adapter.kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_are_refused(case):
    from hp_plan.checks.checks import check_plan

    tables, run, match = REFUSED[case]
    found = [each for each in check_plan(plan_of(run=run, **tables)) if each.key == "run.generation"]
    assert len(found) == 1 and match in found[0].message and "leave run.generation out" in found[0].fix


@on_ranks(2)
@pytest.mark.parametrize(
    "config, overrides, match",
    [
        ("LlamaConfig", {"attention_dropout": 0.1}, "attention_dropout = 0.1, which draws in training"),
        ("MixtralConfig", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("MambaConfig", {}, "'mamba' is not tested for it; take a causal language model of gemma2, llama"),
        ("LlamaConfig", {"attn_implementation": "flex_attention"}, "attention is computed by 'flex_attention'"),
    ],
)
def test_models_are_refused_before_communication(config, overrides, match):
    known = {} if config == "MambaConfig" else SIZES
    plan = plan_of(mesh={"dp_shard": 2}, model={"config": config, "overrides": {**known, **overrides}})
    with pytest.raises(PlanError, match=match):
        apply(build_model(plan), plan)


def test_a_kernel_that_needs_a_place_is_refused():
    def by_place(rows):
        return rows * torch.arange(rows.shape[-2])[:, None]

    with pytest.raises(NotImplementedError, match="shuffled of torch.float32 with 8 columns gives a row other bits"):
        by_rows(torch.ones(3, 8), by_place, "shuffled")


def test_rows_are_cut_where_a_kernel_adds_up_many_in_another_order():
    counts = []

    def total(rows):
        result = torch.zeros_like(rows[..., :1])
        for column in rows.split(1, -1):
            result = result + column
        return result

    def function(rows):
        counts.append(rows.shape[-2])
        return total(rows if rows.shape[-2] in (16, 64, 256, 1024, 4096) else rows.flip(-1))

    rows = cancelling((83, 32), torch.float32, torch.device("cpu"))
    assert by_rows(rows, function, "changing").equal(total(rows))
    assert counts[-3:] == [64, 16, 16]
    assert not total(rows.flip(-1)).equal(total(rows))
