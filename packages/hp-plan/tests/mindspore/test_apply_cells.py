"""A Qwen3 of Cells under a plan does what it does in one process: loss, every gradient, in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, value_and_grad

from hp_dtensor import DTensor, Replicate, Shard, SkipDTensorDispatch, parallelize_value_and_grad
from hp_plan import ParallelPlan, PlanError, apply, build_model, build_optimizer
from hp_plan.mindspore.models import forward_loss, named_parameters
from hp_plan.plan import data_parallel_rows
from hp_platform import get_platform
from hp_testing import on_ranks

TOLERANCE = 1e-5


def plan_of(mesh, styles="auto", tied=True, **sections):
    sys.path.append(str(Path(__file__).parents[4] / "examples"))
    overrides = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
    }
    return ParallelPlan.from_dict(
        {
            "model": {"function": "mindspore_qwen3:qwen3", "overrides": overrides},
            "mesh": mesh,
            "styles": styles,
            "fsdp": {} if set(mesh) == {"tp"} else {"groups": ["model.layers.*"]},
            "data": {"batch_size": 4, "sequence_length": 8},
            **sections,
        }
    )


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).asnumpy()


def check(plan):
    tokens = np.random.default_rng(0).integers(0, 37, (4, 8))
    single, model = build_model(plan), apply(build_model(plan), plan)
    expected = value_and_grad(lambda given: forward_loss(plan, single, given), None, list(single.trainable_params()))
    loss, gradients = expected(Tensor(tokens))
    weights = list(model.trainable_params())
    got = parallelize_value_and_grad(lambda given: forward_loss(plan, model, given), None, weights)
    mine, theirs = tokens[data_parallel_rows(plan)], got(Tensor(tokens[data_parallel_rows(plan)]))
    if len(mine) == len(tokens):
        assert abs(float(theirs[0].asnumpy()) - float(loss.asnumpy())) < TOLERANCE
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    for weight, gradient, reference in zip(weights, theirs[1], gradients, strict=True):
        found, wanted = whole(gradient), reference.asnumpy()
        assert found.shape == wanted.shape, names[id(weight)]
        difference = np.abs(found - wanted).max() / np.abs(wanted).max()
        assert difference < TOLERANCE, f"{names[id(weight)]}: {difference:.1e}"
    return model, weights, theirs[1]


@on_ranks(2)
@pytest.mark.parametrize("tied", [True, False])
def test_tensor_parallel(tied):
    model, weights, gradients = check(plan_of({"tp": 2}, tied=tied))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.placements == (Shard(0),)
    assert attention.o_proj.weight.placements == (Shard(1),)
    assert model.model.embed_tokens.weight.placements == (Shard(0),)
    assert model.model.norm.weight.placements == (Replicate(),)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    before = [whole(weight) for weight in weights]
    optimizer = build_optimizer(plan_of({"tp": 2}), weights)
    with SkipDTensorDispatch():
        optimizer(gradients)
    assert all((whole(weight) != old).any() for weight, old in zip(weights, before))


@on_ranks(2)
def test_tensor_and_sequence_parallel():
    check(plan_of({"tp": 2}, "auto-sequence"))


@on_ranks(2)
def test_fully_sharded():
    check(plan_of({"dp_shard": 2}))


@on_ranks(4)
def test_fully_sharded_and_tensor_parallel():
    check(plan_of({"dp_shard": 2, "tp": 2}))


@on_ranks(2)
def test_what_goes_in_and_comes_out_is_plain():
    plan = plan_of({"tp": 2})
    model = apply(build_model(plan), plan)
    tokens = Tensor(np.arange(16).reshape(2, 8))
    output = model(tokens, tokens)
    assert not isinstance(output["loss"], DTensor)
    assert not isinstance(output["logits"], DTensor)
    assert output["logits"].shape == (2, 8, 37)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_weights_of_another_rank_are_those_of_rank_0(axis):
    plan, rank = plan_of({axis: 2}), get_platform().groups.rank()
    expected, model = build_model(plan), build_model(plan)
    for weight in model.get_parameters() if rank == 1 else ():
        weight.set_data(weight * 2 + 1)
    with pytest.warns(UserWarning, match=r"ranks \[1\] have other initial weights than rank 0"):
        model = apply(model, plan)
    for (name, weight), (_, reference) in zip(named_parameters(model), named_parameters(expected), strict=True):
        assert np.array_equal(whole(weight), reference.asnumpy()), name


@on_ranks(2)
def test_ranks_that_are_passed_other_samples_are_refused_before_they_compute():
    plan = plan_of({"tp": 2})
    model = apply(build_model(plan), plan)
    tokens = Tensor(np.arange(16).reshape(2, 8) + get_platform().groups.rank())
    with pytest.raises(
        ValueError, match=r"tp: ranks \[0, 1\] compute the same samples together, but rank 0 is passed 0"
    ):
        model(tokens, tokens)


@on_ranks(2)
def test_a_mesh_that_does_not_fit():
    with pytest.raises(PlanError, match="the mesh tp 4 has 4 ranks, but there are 2; start 4 ranks"):
        plan = plan_of({"tp": 4})
        apply(build_model(plan), plan)


@pytest.mark.thorough
@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_an_optimizer_made_before_trains_what_is_applied(mesh):
    optimizer_made_before(mesh)


@on_ranks(4)
def test_an_optimizer_made_before_trains_what_is_applied_to_both_axes():
    optimizer_made_before({"dp_shard": 2, "tp": 2})


def optimizer_made_before(mesh):
    plan, tokens = plan_of(mesh), np.random.default_rng(0).integers(0, 37, (4, 8))
    model, one = build_model(plan), build_model(plan)
    before = list(model.trainable_params())
    optimizer, reference = build_optimizer(plan, before), build_optimizer(plan, one.trainable_params())
    weights = list(apply(model, plan).trainable_params())
    assert all(a is b for a, b in zip(weights, before, strict=True))
    step = parallelize_value_and_grad(lambda given: forward_loss(plan, model, given), None, weights)
    alone = value_and_grad(lambda given: forward_loss(plan, one, given), None, list(one.trainable_params()))
    for _ in range(2):
        gradients = step(Tensor(tokens))[1]
        with SkipDTensorDispatch():
            optimizer(gradients)
        reference(alone(Tensor(tokens))[1])
    for weight, wanted in zip(weights, one.trainable_params(), strict=True):
        np.testing.assert_allclose(whole(weight), wanted.asnumpy(), rtol=0, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize(("axis", "kind"), [("dp_shard", "recompute"), ("dp_shard", "swap"), ("tp", "swap")])
def test_blocks_are_computed_again_or_wait_on_the_host(axis, kind):
    check(plan_of({axis: 2}, memory={kind: ["model.layers.*"]}))


@on_ranks(2)
def test_tensor_parallel_blocks_are_not_computed_again():
    plan = plan_of({"tp": 2}, memory={"recompute": ["model.layers.*"]})
    with pytest.raises(PlanError, match=r"memory\.recompute: got recompute with mesh\.tp = 2, which this version"):
        apply(build_model(plan), plan)


@on_ranks(2)
def test_shards_on_the_host():
    check(plan_of({"dp_shard": 2}, fsdp={"groups": ["model.layers.*"], "offload": True}))
