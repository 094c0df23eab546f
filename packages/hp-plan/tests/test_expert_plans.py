"""Mixtures of experts of transformers under plans with `ep`; `nox -s expert_plans` verifies all families on all."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from expert_families import plan_of

from hp_plan import ParallelPlan, apply, build_model, lint, verify
from hp_plan.extend import data_parallel_rows
from hp_plan.features.experts import check_auxiliary_loss
from hp_plan.port import models
from hp_plan.structure.memory import training_bytes
from hp_plan.structure.outline import ModelOutline
from hp_plan.torch.compared import Float64
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.framework("torch"),  # transformers' models are PyTorch's
    pytest.mark.not_on("torch-npu-sim", "torch-npu", reason="reduces float64 over ranks, which HCCL does not"),
]
EXPERTS = "model.layers.*.mlp.experts"


def check(plan, tolerance=1e-10):
    result = verify(plan, tolerance=tolerance)
    assert result.passed, f"{result.first} differs: {result.largest:.1e}"


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize(
    ("config", "mesh", "experts"),
    [
        ("Qwen3MoeConfig", {"dp_shard": 2, "ep": 2}, 8),
        ("GptOssConfig", {"dp_shard": 2, "ep": 2}, 7),
        ("DeepseekV3Config", {"tp": 2, "ep": 2}, 8),
        ("MixtralConfig", {"tp": 2, "ep": 2}, 7),
    ],
)
def test_experts_on_two_ranks(config, mesh, experts):
    check(plan_of(config, mesh, experts=experts))


@on_ranks(2)
def test_a_copy_of_a_model_with_experts_is_one_of_its_own():
    plan = plan_of("Qwen3MoeConfig", {"tp": 2, "ep": 2})
    model = apply(build_model(plan, device=device_type()), plan)
    copied = copy.deepcopy(model)
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, copied)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    total = [parameter.detach().square().sum() for parameter in copied.parameters()]
    with pytest.raises(ValueError, match=r"operands are on different meshes, .*; add their full_tensor\(\), plain"):
        sum(total)
    assert sum(each.full_tensor() for each in total) > 0


@on_ranks(2)
def test_experts_and_sequence_parallel():
    check(plan_of("Qwen3MoeConfig", {"tp": 2, "ep": 2}, styles="auto-sequence"))


@on_ranks(4)
@pytest.mark.parametrize(
    ("mesh", "experts", "styles"),
    [
        pytest.param({"dp_shard": 4, "ep": 2}, 7, "auto", id="uneven-and-sharded"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 8, "auto", id="replicas"),
        pytest.param({"dp_shard": 2, "tp": 2, "ep": 4}, 8, "auto", id="over-both-axes"),
        pytest.param({"dp_shard": 2, "tp": 2, "ep": 2}, 8, "auto", id="over-tp"),
        pytest.param({"dp_shard": 2, "tp": 2, "ep": 2}, 8, {EXPERTS: "expert_tensor_parallel"}, id="features"),
        pytest.param({"pp": 2, "dp_shard": 2, "ep": 2}, 8, "auto", id="stages"),
    ],
)
def test_experts_on_four_ranks(mesh, experts, styles):
    check(plan_of("Qwen3MoeConfig", mesh, experts=experts, styles=styles))


def texts(plan):
    return [str(diagnostic) for diagnostic in lint(plan)]


def problem(plan):
    (text,) = texts(plan)
    return text


def test_a_plan_for_experts_has_no_diagnostics():
    for mesh in ({"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"dp_shard": 4, "tp": 2, "pp": 2, "ep": 4}):
        assert texts(plan_of("Qwen3MoeConfig", mesh)) == []
    named = {
        EXPERTS: "ep_dispatch_experts",
        f"{EXPERTS}.gate_up_proj": "grouped_gemm",
        f"{EXPERTS}.down_proj": "grouped_gemm",
    }
    assert texts(plan_of("Qwen3MoeConfig", {"dp_shard": 2, "ep": 2}, styles=named)) == []


@pytest.mark.parametrize(
    ("mesh", "styles", "expected"),
    [
        (
            {"dp_shard": 2, "tp": 2, "ep": 2},
            {EXPERTS: "expert_parallel", "model.layers.0.mlp.experts": "expert_tensor_parallel"},
            "2 styles on model.layers.0.mlp.experts",
        ),
        (
            {"dp_shard": 2, "tp": 2, "ep": 2},
            {
                "model.layers.1.mlp.experts": "expert_parallel",
                "model.layers.0.mlp.experts": "expert_tensor_parallel",
            },
            "styles: styles of experts are both 'expert_parallel' and 'expert_tensor_parallel', for one axis ep; take"
            " 'expert_parallel' for all of them",
        ),
        (
            {"dp_shard": 2},
            {EXPERTS: "expert_parallel"},
            "mesh.ep is 1; make mesh.ep at least 2, or leave the style out",
        ),
        (
            {"dp_shard": 2, "ep": 2},
            {EXPERTS: "expert_tensor_parallel"},
            "there is no tp, over which features would be sharded; take 'expert_parallel'",
        ),
        (
            {"dp_shard": 2, "tp": 4, "ep": 2},
            {EXPERTS: "expert_parallel"},
            "ep = 2 is no multiple of tp = 4, whose ranks have the same tokens; take 'expert_tensor_parallel'",
        ),
        (
            {"dp_shard": 2, "tp": 2, "ep": 4},
            {EXPERTS: "expert_tensor_parallel"},
            "ep = 4 does not divide the 2 ranks beside tp; take 'expert_parallel'",
        ),
        (
            {"dp_shard": 2, "ep": 2},
            {"model.layers.*.mlp": "expert_parallel"},
            "a Qwen3MoeSparseMoeBlock is no module of experts, or is called without its tokens' routing; name a module",
        ),
        (
            {"dp_shard": 2, "ep": 2},
            {"model.layers.*.self_attn.q_proj": "colwise"},
            f'styles: ep = 2, but no style spreads experts over it; add "{EXPERTS}" = "expert_parallel"',
        ),
        ({"dp_shard": 2, "ep": 2}, {EXPERTS: "expert_paralel"}, "did you mean 'expert_parallel'"),
        (
            {"dp_shard": 2, "tp": 2, "ep": 4},
            {"model.layers.*.mlp": "plain", EXPERTS: "expert_parallel"},
            "it is inside of a part with style 'plain', whose tokens are the same on all ranks of tp; give the modules",
        ),
    ],
)
def test_styles_that_do_not_fit_are_refused(mesh, styles, expected):
    assert any(expected in text for text in texts(plan_of("Qwen3MoeConfig", mesh, styles=styles)))


@pytest.mark.parametrize(
    ("mesh", "experts", "expected"),
    [
        ({"dp_shard": 16, "ep": 16}, 8, "8 experts for ep = 16 ranks; make mesh.ep at most 8"),
        (
            {"dp_shard": 2, "tp": 4, "ep": 2},
            7,
            "ep = 2 does not divide 7 experts with sharded features; make mesh.ep a divisor of 7, or take"
            " 'expert_parallel', which spreads experts unevenly",
        ),
    ],
)
def test_numbers_of_experts_that_do_not_fit_are_refused(mesh, experts, expected):
    overrides = {"num_attention_heads": 4, "num_key_value_heads": 4}
    assert expected in problem(plan_of("Qwen3MoeConfig", mesh, experts=experts, overrides=overrides))


def test_a_family_without_an_expert_parallel_plan_is_refused():
    overrides = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16}
    overrides |= {"num_local_experts": 4, "vocab_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    tables = {
        "model": {"config": "Llama4TextConfig", "overrides": {**overrides, "head_dim": 8, "pad_token_id": None}},
        "mesh": {"dp_shard": 2, "ep": 2},
        "fsdp": {"groups": ["model.layers.*"]},
    }
    text = problem(ParallelPlan.from_dict(tables))
    assert text == (
        "styles: ep = 2, but Llama4ForCausalLM (model_type 'llama4_text') has no expert parallel plan"
        " (base_model_ep_plan); leave mesh.ep out; mesh.dp_shard and mesh.tp shard all parameters"
    )
    named = {**tables, "styles": {"model.layers.*.feed_forward.experts": "expert_parallel"}}
    assert "a Llama4TextExperts is no module of experts, or is called without its tokens' routing" in problem(
        ParallelPlan.from_dict(named)
    )


def test_a_load_balancing_loss_that_is_not_known_is_refused_where_ranks_have_other_tokens():
    model = ModelOutline({}, config=SimpleNamespace(sub_configs={}, output_router_logits=True))
    for mesh, parts in (({"dp_shard": 2, "tp": 2}, 2), ({"dp_replicate": 3}, 3), ({"dp_shard": 2, "cp": 2}, 4)):
        (diagnostic,) = check_auxiliary_loss(ParallelPlan.from_dict({"mesh": mesh}), model)
        assert str(diagnostic) == (
            f"model.overrides: output_router_logits adds a load balancing loss of the tokens of each of {parts} ranks"
            " alone; write output_router_logits = false in [model.overrides]: the loss of all tokens is no mean of"
            " theirs"
        )
    assert check_auxiliary_loss(ParallelPlan.from_dict({"mesh": {"tp": 2}}), model) == []
    without = ModelOutline({}, config=SimpleNamespace(sub_configs={}, output_router_logits=False))
    assert check_auxiliary_loss(ParallelPlan.from_dict({"mesh": {"dp_shard": 2}}), without) == []


LOGITS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_load_balancing_losses_are_of_all_tokens(mesh):
    """Those of each rank's tokens, averaged, gave gradients of embeddings that were wrong by more than their size."""
    check(plan_of("Qwen3MoeConfig", mesh, overrides=LOGITS))


@on_ranks(2)
def test_a_load_balancing_loss_that_a_call_asks_for_is_of_all_tokens():
    plan = plan_of("MixtralConfig", {"dp_shard": 2}, run={"dtype": "float64"})
    single = build_model(plan).to(device_type()).train()
    model = apply(copy.deepcopy(single), plan)
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(2)).to(device_type())
    with Float64():
        expected, got = (
            each(part, output_router_logits=True).aux_loss
            for each, part in ((single, tokens), (model, tokens[data_parallel_rows(plan)]))
        )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_experts_that_ranks_do_not_divide_take_the_memory_of_the_most():
    def bytes_of(experts, ep):
        plan = plan_of("MixtralConfig", {"dp_shard": 4, "ep": ep}, experts=experts)
        return training_bytes(plan, models().outline(build_model(plan, device="meta")))

    one = 3 * 16 * 24  # elements of an expert
    for experts, ep, most in ((8, 4, 2), (7, 4, 2), (7, 2, 2), (5, 4, 2)):
        dense = bytes_of(8, 1) - 2 * 2 * one * 4 * 4  # two layers; weight, gradient, two states, of four bytes
        router = 2 * (8 - experts) * 16 * 4 * 4 // 4
        assert bytes_of(experts, ep) == pytest.approx(dense - router + 2 * most * one * 4 * 4, abs=64)


def test_an_ep_that_fits_no_axes_is_one_error():
    plan = ParallelPlan.from_dict(
        {
            "model": {"config": "Qwen3MoeConfig", "overrides": {"num_hidden_layers": 1, "num_experts": 6}},
            "mesh": {"dp_shard": 2, "ep": 3},
            "styles": "auto",
        }
    )
    (diagnostic,) = lint(plan)
    assert "ep = 3 does not fit the 2 ranks that share a copy of the model, dp_shard 2" in str(diagnostic)
