"""Generation under a plan: the tokens of one process, drawn by number, with parameters gathered once."""

from __future__ import annotations

import pytest
import torch

from hp_plan import ParallelPlan, apply, build_model, build_parallel_model, generating, log_probabilities
from hp_plan.torch.generation.generating import uniform
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.5,  # far from ties between tokens
}
OPTIONS = {"max_new_tokens": 7, "pad_token_id": 0, "eos_token_id": 5}


def plan_of(family="Qwen3", **mesh):
    table = {
        "model": {"config": f"{family}Config", "overrides": SIZES},
        "mesh": mesh,
        "data": {"sequence_length": 16},
        "run": {"dtype": "float64"},
    }
    if mesh.get("tp", 1) > 1:
        table["styles"] = "auto"
    return ParallelPlan.from_dict(table)


def prompts(rows):
    ids = torch.randint(6, 37, (rows, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1::2, :2] = mask[1::2, :2] = 0  # padding on the left
    return ids.to(device_type()), mask.to(device_type())


def same(found, expected):
    """Compare texts that may be filled up to different lengths."""
    length = min(found.shape[1], expected.shape[1])
    assert found[:, :length].tolist() == expected[:, :length].tolist()
    assert not found[:, length:].any() and not expected[:, length:].any()


def alone(rows, **options):
    model = build_model(plan_of(), device=device_type())
    ids, mask = prompts(rows)
    with generating(model, seed=3) as generation:
        numbers = {"samples": range(rows)} if options.get("do_sample") else {}
        texts = model.generate(ids, attention_mask=mask, **numbers, **OPTIONS, **options)
    return texts, generation


@on_ranks(2, 3)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_the_tokens_are_those_of_one_process(axis, options, ranks):
    if axis == "tp" and ranks == 3:
        axis = "dp_shard"
    expected, one = alone(6, **options)
    model = apply(build_model(plan_of(**{axis: ranks}), device=device_type()), plan_of(**{axis: ranks}))
    ids, mask = prompts(6)
    rank = get_platform().groups.rank()
    own = range(6)[rank * 6 // ranks : (rank + 1) * 6 // ranks] if axis == "dp_shard" else range(6)
    numbers = {"samples": own} if options["do_sample"] else {}
    with generating(model, seed=3) as generation:
        rows = slice(own.start, own.stop)
        texts = model.generate(ids[rows], attention_mask=mask[rows], **numbers, **OPTIONS, **options)
        report = generation.report()
    same(texts, expected[rows])
    new = texts.shape[1] - ids.shape[1]
    counts = one.counts[rows, :new]
    assert generation.counts.equal(counts)
    torch.testing.assert_close(generation.log_probabilities, one.log_probabilities[rows, :new], rtol=0, atol=1e-6)
    assert report.tokens == int(counts.sum())
    assert report.largest < 1e-6  # transformers has logits in float32
    assert bool(generation.gathered) == (axis == "dp_shard")
    assert model.training
    model(ids, labels=ids).loss.backward()  # groups are shards again
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize(("family", "ep"), [("Qwen3", 1), ("Mixtral", 2)])
def test_ranks_with_different_ends_and_lengths_do_not_hang(family, ep):
    plan = plan_of(family, dp_shard=2, ep=ep)  # experts exchange tokens, whatever stays gathered
    model = apply(build_model(plan, device=device_type()), plan)
    ids, mask = prompts(4)
    rank = get_platform().groups.rank()
    for own in ({0: ids[:1], 1: ids[1:]}, {0: ids[:, -1:], 1: ids}):
        rows = own[rank]
        # Everything ends a text of rank 0, with its first token.
        ends = {"eos_token_id": list(range(37))} if rank == 0 else {}
        for memory in (None, 0):
            with generating(model, memory=memory) as generation:
                options = {**OPTIONS, **ends, "do_sample": False}
                texts = model.generate(rows, attention_mask=torch.ones_like(rows), **options)
                assert (len(generation.gathered) == len(list(model._groups(True)))) == (memory is None)
                generation.report()
            assert texts.shape[1] - rows.shape[1] == (1 if rank == 0 else 7)
            if rank == 0:
                assert generation.counts.all()


@on_ranks(2)
def test_a_rank_without_prompts_takes_part():
    model = apply(build_model(plan_of(dp_shard=2), device=device_type()), plan_of(dp_shard=2))
    expected, _ = alone(2, do_sample=True)
    ids, mask = prompts(2)
    own = slice(0, 2) if get_platform().groups.rank() else slice(0, 0)
    for memory in (None, 0):
        with generating(model, seed=3, memory=memory) as generation:
            options = {**OPTIONS, "do_sample": True, "samples": range(2)[own]}
            texts = model.generate(ids[own], attention_mask=mask[own], **options)
            report = generation.report()
        assert len(texts) == len(generation.counts) == len(ids[own])
        assert bool(report.tokens) == bool(len(texts))
        if len(texts):
            same(texts, expected)
    for value in log_probabilities(model, texts if len(texts) else ids[own]):
        value.sum().backward(retain_graph=True)
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
def test_parameters_are_gathered_once():
    model = apply(build_model(plan_of(dp_shard=2), device=device_type()), plan_of(dp_shard=2))
    ids, mask = prompts(2)
    counts = {}
    for memory in (None, 0):
        gathers = []
        inner = type(model._hsdp_group)._gather

        def counted(group, inner=inner, gathers=gathers):
            gathers.append(group.name)
            return inner(group)

        type(model._hsdp_group)._gather = counted
        try:
            with generating(model, memory=memory) as generation:
                model.generate(ids, attention_mask=mask, do_sample=False, **{**OPTIONS, "eos_token_id": None})
        finally:
            type(model._hsdp_group)._gather = inner
        counts[memory] = len(gathers)
    groups = 3  # the model and its two layers
    assert len(generation.gathered) == 0
    assert counts == {None: groups, 0: groups * OPTIONS["max_new_tokens"]}


@on_ranks(1)
def test_a_text_does_not_depend_on_its_batch():
    model = build_model(plan_of(), device=device_type())
    ids, mask = prompts(4)
    options = {**OPTIONS, "do_sample": True, "num_return_sequences": 2}
    with generating(model, seed=9):
        together = model.generate(ids, attention_mask=mask, samples=range(4), **options)
        for number in range(4):
            row = slice(number, number + 1)
            single = model.generate(ids[row], attention_mask=mask[row], samples=[number], **options)
            same(single, together[2 * number : 2 * number + 2])
    assert not together[0].equal(together[1])  # two texts of one prompt are drawn apart
    with generating(model, seed=10):
        assert not model.generate(ids, attention_mask=mask, samples=range(4), **options).equal(together)


def test_numbers_are_spread_evenly():
    numbers = torch.tensor([uniform(7, sample, 0, place) for sample in range(100) for place in range(100)])
    counts = numbers.histc(bins=10, min=0, max=1)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert counts.min() > 900 and counts.max() < 1100
    assert len(set(numbers.tolist())) > 9990


@on_ranks(2)
def test_what_is_not_given_is_refused():
    model = apply(build_model(plan_of(dp_shard=2), device=device_type()), plan_of(dp_shard=2))
    ids, mask = prompts(2)
    with generating(model, seed=0) as generation:
        with pytest.raises(RuntimeError, match="call it after a generate"):
            generation.report()
        with pytest.raises(ValueError, match="pass samples=, the number of each prompt"):
            model.generate(ids, attention_mask=mask, do_sample=True, **OPTIONS)
        with pytest.raises(ValueError, match="has 3 numbers for 2 texts"):
            model.generate(ids, attention_mask=mask, do_sample=True, samples=range(3), **OPTIONS)
        with pytest.raises(ValueError, match="beams are not drawn by number"):
            model.generate(ids, attention_mask=mask, do_sample=True, num_beams=2, samples=range(2), **OPTIONS)
    with generating(model):
        with pytest.raises(ValueError, match="samples= is for do_sample=True"):
            model.generate(ids, attention_mask=mask, samples=range(2), do_sample=True, **OPTIONS)
        with pytest.raises(ValueError, match="samples= must be the numbers of prompts, got 'ab'"):
            model.generate(ids, attention_mask=mask, do_sample=True, samples="ab", **OPTIONS)
    for options, text in (
        ({"memory": -1}, "memory must be a number of bytes"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
    ):
        with pytest.raises(ValueError, match=text), generating(model, **options):
            pass
    with pytest.raises(NotImplementedError, match="Linear has no generate"), generating(torch.nn.Linear(1, 1)):
        pass


@on_ranks(2)
def test_ranks_that_share_a_model_do_not_draw_apart():
    model = apply(build_model(plan_of(tp=2), device=device_type()), plan_of(tp=2))
    ids, mask = prompts(2)
    with generating(model), pytest.raises(ValueError, match="would draw different tokens"):
        model.generate(ids, attention_mask=mask, do_sample=True, **OPTIONS)


@on_ranks(1)
def test_what_fills_a_stopped_text_up_does_not_count():
    model = build_model(plan_of(), device=device_type())
    ids, mask = prompts(2)

    def first_row_after_two(texts, scores, **options):
        return torch.tensor([texts.shape[1] >= ids.shape[1] + 2, False], device=texts.device)

    stops = {"stopping_criteria": [first_row_after_two], "do_sample": False, **OPTIONS, "eos_token_id": 36}
    with generating(model) as generation:
        model.generate(ids, attention_mask=mask, **stops)
        assert generation.counts.sum(1).tolist() == [2, 7]
        assert not generation.log_probabilities[0, 2:].any()
        whole = generation.report()
        model.generate(ids, **stops)  # transformers finds the padding by itself
        assert generation.report().largest < 1e-6
        with pytest.raises(ValueError, match="candidates of an assistant"):
            model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=3, **stops)
    assert whole.tokens == 9 and whole.largest < 1e-6


@on_ranks(2)
def test_a_model_whose_ranks_have_parts_of_a_text_is_refused():
    model = build_parallel_model(plan_of(cp=2))
    with pytest.raises(NotImplementedError, match="under cp"), generating(model):
        pass
