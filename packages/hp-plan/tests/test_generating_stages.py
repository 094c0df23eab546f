"""Generation and log-probabilities of a model in stages: on all ranks those of one process."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hp_pipeline import PipelinedModel, PipelineStage, Schedule1F1B, split_model
from hp_plan import ParallelPlan, apply, build_model, generating, log_probabilities
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.5,  # far from ties between tokens
}
OPTIONS = {"max_new_tokens": 7, "pad_token_id": 0, "eos_token_id": 5}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}


def plan_of(schedule="1f1b", family="Qwen3", dtype="float64", styles="auto", overrides=(), **mesh):
    table = {
        "model": {"config": f"{family}Config", "overrides": SIZES | dict(overrides)},
        "mesh": mesh,
        "pipeline": {"schedule": schedule, "micro_batches": 2},
        "data": {"sequence_length": 16, "batch_size": 4 * mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)},
        "run": {"dtype": dtype},
    }
    return ParallelPlan.from_dict(table | ({"styles": styles} if "tp" in mesh or "ep" in mesh else {}))


def prompts(rows, length=5):
    ids = torch.randint(6, 37, (rows, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1::2, : length // 2] = mask[1::2, : length // 2] = 0  # padding on the left
    return ids.to(device_type()), mask.to(device_type())


def written(model, ids, mask, first=0, memory=None, **options):
    """Return texts, what generation and what one forward say of their new tokens, and the report."""
    numbers = {"samples": range(first, first + len(ids))} if options.get("do_sample") else {}
    with generating(model, seed=3, memory=memory) as generation:
        texts = model.generate(ids, attention_mask=mask, **numbers, **{**OPTIONS, **options})
        report = generation.report() if options.get("num_beams", 1) == 1 else None
    return texts, generation, report


def same(found, expected, **tolerance):
    texts, generation, report = found
    others, one, its = expected
    assert texts.tolist() == others.tolist()
    if report is not None:
        assert generation.counts.equal(one.counts)
        tolerance = tolerance or {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(generation.log_probabilities, one.log_probabilities, **tolerance)
        assert report.tokens == its.tokens and report.largest < 1e-4


@on_ranks(2, 3)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_every_rank_generates_what_one_process_does(schedule, options, ranks):
    plan = plan_of(schedule, overrides={"num_hidden_layers": 6}, pp=ranks)
    model = build_model(plan, device=device_type())
    ids, mask = prompts(6)
    short = prompts(3, length=1)
    expected = written(model, ids, mask, **options), written(model, *short, **options)
    model = apply(model, plan)
    same(written(model, ids, mask, **options), expected[0])
    same(written(model, *short, **options), expected[1])
    assert model.training and not hasattr(model, "generate")


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"tp": 2, "styles": "auto-sequence"}],
    ids=["fsdp", "hsdp", "tp", "sequence"],
)
def test_two_axes(mesh, schedule):
    plan = plan_of(schedule, overrides={"tie_word_embeddings": "tp" not in mesh and schedule == "1f1b"}, pp=2, **mesh)
    model = build_model(plan, device=device_type())
    ids, mask = prompts(6)
    place = 0 if "tp" in mesh else get_platform().groups.rank() % 2
    rows = slice(0, 6) if "tp" in mesh else (slice(0, 2), slice(2, 6))[place]
    # Everything ends the texts of one pipeline, and nothing those of the other.
    ends = {"eos_token_id": None if place else list(range(37))}
    runs = [SAMPLED, {**GREEDY, **ends}]
    expected = [written(model, ids[rows], mask[rows], rows.start, **options) for options in runs]
    model = apply(model, plan)
    for memory in (None, 0) if "dp_shard" in mesh else (None,):
        for options, other in zip(runs, expected, strict=True):
            found = written(model, ids[rows], mask[rows], rows.start, memory, **options)
            same(found, other, rtol=0, atol=1e-6)  # transformers has logits in float32
            kept = [name for name in found[1].gathered if "layer" in name.lower()]
            assert bool(kept) == (memory is None and "tp" not in mesh)
    if "tp" not in mesh:
        texts, generation, report = written(model, ids[: 2 * place], mask[: 2 * place], **SAMPLED)
        assert len(texts) == len(generation.counts) == 2 * place and bool(report.tokens) == bool(place)
    batch = ids[:4]
    losses = model.run(input_ids=batch, labels=batch)  # groups are shards again
    assert len(losses) == (2 if model.schedule.stages[-1].is_last_stage else 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("options", [GREEDY, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "whole"])
@pytest.mark.parametrize(
    "family, overrides",
    [
        ("Mistral", {"sliding_window": 4}),
        ("Gemma3Text", {"sliding_window": 4, "layer_types": ["full_attention", *["sliding_attention"] * 3]}),
        ("Mixtral", {"num_local_experts": 4, "hidden_size": 32, "head_dim": 8}),
        ("GPTNeoX", {}),
    ],
)
def test_families(family, overrides, options):
    dtype = "float32" if family == "Mixtral" else "float64"  # grouped products are in float32
    plan = plan_of("zbv", family, dtype, overrides=overrides, pp=2)
    model = build_model(plan, device=device_type())
    ids, mask = prompts(4)
    expected = written(model, ids, mask, **options)
    same(written(apply(model, plan), ids, mask, **options), expected)


@on_ranks(4)
def test_experts_that_pipelines_share():
    experts = {"num_local_experts": 4, "hidden_size": 32, "head_dim": 8}
    plan = plan_of(family="Mixtral", dtype="float32", overrides=experts, pp=2, dp_shard=2, ep=2)
    model = build_model(plan, device=device_type())
    ids, mask = prompts(4)
    first = get_platform().groups.rank() % 2 * 2
    rows = slice(first, first + 2)
    expected = written(model, ids[rows], mask[rows], first, **SAMPLED)
    same(written(apply(model, plan), ids[rows], mask[rows], first, **SAMPLED), expected, rtol=0, atol=1e-4)


@on_ranks(2)
def test_generating_leaves_training_as_it_is():
    plan = plan_of(overrides={"attention_dropout": 0.3}, pp=2)
    ids, mask = prompts(4)
    weights = []
    for generates in (True, False):
        torch.manual_seed(0)
        model = apply(build_model(plan, device=device_type()), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model.run(input_ids=ids, labels=ids)
            optimizer.step()
            optimizer.zero_grad()
            if generates:
                written(model, ids, mask, **SAMPLED)
        weights.append(model.state_dict())
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_are_those_of_one_process(tied):
    plan = plan_of("interleaved", "Granite", overrides={"logits_scaling": 3.0, "tie_word_embeddings": tied}, pp=2)
    model = build_model(plan, device=device_type()).eval()
    ids, mask = prompts(3, length=9)
    options = {"attention_mask": mask, "temperature": 0.7, "chunk": 5}
    with torch.no_grad():
        expected = log_probabilities(model, ids, **options)
        model = apply(model, plan).eval()
        found = log_probabilities(model, ids, **options)
        empty = log_probabilities(model, ids[:0], attention_mask=mask[:0])
    assert found.log_probabilities.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert empty.entropy.shape == (0, 8)
    with pytest.raises(NotImplementedError, match="under pp computes them without gradients"):
        log_probabilities(model, ids)


@on_ranks(2)
def test_stages_without_a_plan_generate():
    plan = plan_of(pp=2)
    model = build_model(plan, device=device_type())
    ids, mask = prompts(2)
    expected = written(model, ids, mask, **SAMPLED)
    pipelined = PipelinedModel(Schedule1F1B(split_model(model, 2).pipeline_stage(get_platform().groups.rank()), 2))
    same(written(pipelined, ids, mask, **SAMPLED), expected)


@on_ranks(2)
def test_what_stages_do_not_do_is_refused():
    plan, rank = plan_of(pp=2), get_platform().groups.rank()
    model = apply(build_model(plan, device=device_type()), plan)
    ids, mask = prompts(2)
    inputs = {"inputs": ids, "attention_mask": mask, **OPTIONS, **GREEDY}
    with generating(model):
        for name, value, text in [
            ("cache_implementation", "static", "must be a DynamicCache .* got a StaticCache of 4"),
            ("past_key_values", DynamicCache(), "must be a DynamicCache .* of 4 blocks, got a DynamicCache of 0"),
            ("output_hidden_states", True, "takes no output_hidden_states"),
            ("prompt_lookup_num_tokens", 3, "candidates of an assistant"),
        ]:
            options = {**inputs, name: value, "return_dict_in_generate": True}
            with pytest.raises((NotImplementedError, ValueError), match=text):
                model.generate(**options)
        with pytest.raises(ValueError, match="would stop at different times; leave max_time out"):
            model.generate(**inputs, max_time=60.0)
        with pytest.raises(ValueError, match="pp: ranks .* rank 0 is passed prompts .* where rank 1 is passed prompts"):
            model.generate(**{**inputs, "inputs": ids + rank})
        with pytest.raises(ValueError, match="pp: ranks .* but max_new_tokens is . on rank 0 and . on rank 1"):
            model.generate(**{**inputs, "max_new_tokens": 3 + rank})
        with pytest.raises(ValueError, match="would draw different tokens"):
            model.generate(**{**inputs, "do_sample": True})
    with (
        pytest.raises(ValueError, match="pp: ranks .* but seed is 0 on rank 0 and 1 on rank 1"),
        generating(model, seed=rank),
    ):
        model.generate(**{**inputs, **SAMPLED}, samples=range(2))
    own = PipelinedModel(Schedule1F1B(PipelineStage(torch.nn.Linear(2, 2), rank, 2), 2))
    with pytest.raises(NotImplementedError, match="Linear is no stage of split_model"), generating(own):
        pass


@on_ranks(2)
def test_a_stage_that_fails_is_named_on_all_ranks():
    plan, rank = plan_of(pp=2), get_platform().groups.rank()
    model = apply(build_model(plan, device=device_type()), plan)
    ids, mask = prompts(2)

    def fail(*args):
        raise ValueError("this block is broken")

    blocks = [module for name, module in model.named_modules() if name.endswith("layers.3")]
    handles = [block.register_forward_hook(fail) for block in blocks if rank == 1]
    with generating(model), pytest.raises(RuntimeError, match="rank 1 at 1F0: ValueError: this block is broken"):
        model.generate(ids, attention_mask=mask, **OPTIONS, **GREEDY)
    for handle in handles:
        handle.remove()
    written(model, ids, mask, **SAMPLED)
