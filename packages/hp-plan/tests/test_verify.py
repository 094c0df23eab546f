from __future__ import annotations

import pytest
import torch

import hp_plan.torch.verify as module
from hp_plan import ModuleDifference, ParallelPlan, VerifyResult, verify
from hp_plan.torch.compared import Float64
from hp_testing import on_ranks

PLAN = ParallelPlan.from_dict(
    {
        "model": {
            "config": "LlamaConfig",
            "overrides": {
                "vocab_size": 16,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
        },
        "mesh": {"tp": 2},
        "data": {"sequence_length": 8, "batch_size": 2},
    }
)
SPOILED = "model.layers.1.mlp.up_proj"


def spoil_output(model):
    model.get_submodule(SPOILED).register_forward_hook(lambda module, inputs, output: output * (1 + 1e-7))


def spoil_gradient(model):
    model.get_submodule(SPOILED).weight.register_hook(lambda gradient: gradient * (1 + 1e-7))


def spoil_one_rank(model):
    """An error that rank 0 alone would not see."""
    if torch.distributed.get_rank() == 1:
        spoil_output(model)


@on_ranks(2)
@pytest.mark.parametrize("spoil", [spoil_output, spoil_gradient, spoil_one_rank])
def test_the_first_module_that_differs_is_named(spoil):
    apply = module.apply

    def apply_and_spoil(model, plan):
        spoil(apply(model, plan))
        return model

    module.apply = apply_and_spoil
    try:
        result = verify(PLAN)
    finally:
        module.apply = apply
    assert not result.passed
    assert result.first == SPOILED
    assert 1e-9 < result.largest < 1e-2
    by_name = {row.module: row for row in result.rows}
    assert (by_name[SPOILED].output > 1e-9) == (spoil is not spoil_gradient)


def built_with(change, mesh, **sections):
    """Verify a plan whose models are changed where they are built, the one of one process too."""
    build_model = module.build_model

    def build_and_change(plan, **options):
        model = build_model(plan, **options)
        change(model.get_submodule(SPOILED.rpartition(".")[0]))
        return model

    module.build_model = build_and_change
    try:
        return verify(ParallelPlan.from_dict({**PLAN.to_dict(), "mesh": mesh, **sections}))
    finally:
        module.build_model = build_model


def keep_a_mean(mlp):
    """Statistics that training does not read, and a count of calls."""
    mlp.register_buffer("mean", torch.zeros((), dtype=torch.float64))
    mlp.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def keep(module, inputs, output):
        module.mean.lerp_(inputs[0].detach().square().mean(), 0.5)
        module.calls += 1

    mlp.register_forward_hook(keep)


@on_ranks(2)
def test_buffers_that_differ_are_named():
    result = built_with(keep_a_mean, {"dp_shard": 2}, fsdp={"groups": ["model.layers.*"]})
    assert not result.passed and result.first == SPOILED.rpartition(".")[0]
    row = next(row for row in result.rows if row.module == result.first)
    assert row.weight > 1e-4 and row.output == row.gradient == 0
    assert not [each for each in result.rows if each.largest > 1e-9 and each != row]
    sections = {"pipeline": {"micro_batches": 2}}
    assert built_with(keep_a_mean, {"pp": 2}, **sections).first == SPOILED.rpartition(".")[0]


def read_the_rank(mlp):
    mlp.register_forward_hook(lambda module, inputs, output: output * (1 + 1e-3 * torch.distributed.get_rank()))


def skip_on_an_odd_rank(mlp):
    """What would end in other collectives on one rank."""
    odd = torch.distributed.get_rank() % 2
    mlp.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output) if odd else output)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
@pytest.mark.parametrize("change", [read_the_rank, skip_on_an_odd_rank])
def test_a_model_that_reads_the_rank_is_not_run_under_the_plan(change, axis):
    result = built_with(change, {axis: 2}, pipeline={"micro_batches": 2} if axis == "pp" else {})
    assert not result.passed and len(result.steps) == 1
    assert result.first == "model.norm"  # the first innermost module after the change
    assert "first in 'model.norm': it reads the rank, or draws at random; nothing was run under" in result.notes[0]


def count_calls(mlp):
    calls = []

    def scale(module, inputs, output):
        calls.append(1)
        return output * (1 + 0.01 * len(calls))

    mlp.register_forward_hook(scale)


@on_ranks(2)
def test_nothing_but_the_two_programs_calls_their_models():
    result = built_with(count_calls, {"tp": 2})
    assert result.passed, (result.first, result.largest)


@on_ranks(2)
def test_an_output_that_is_written_to_afterwards_is_no_difference():
    result = built_with(lambda mlp: mlp.register_forward_hook(lambda _, inputs, output: output.mul_(0.5)), {"tp": 2})
    assert result.passed, (result.first, result.largest)


@on_ranks(2)
def test_a_module_that_the_loss_does_not_see_is_no_difference():
    overrides = {**PLAN.model.overrides, "num_attention_heads": None, "num_key_value_heads": None}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    tables = {**PLAN.to_dict(), "model": {"config": "FNetConfig", "task": "masked-lm", "overrides": overrides}}
    plan = ParallelPlan.from_dict({**tables, "mesh": {"pp": 2}, "pipeline": {"micro_batches": 2}})
    result = verify(plan)
    assert result.passed and "fnet.pooler.dense" in [row.module for row in result.rows], result.first


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_muon_is_verified(mesh):
    norms = {"patterns": ["*.*norm.weight", "model.layers.*.*norm.weight"], "weight_decay": 0.0}
    optimizer = {"name": "muon", "lr": 0.02, "groups": [norms, {"patterns": ["lm_head.weight"], "lr_multiple": 0.5}]}
    schedule = {"kind": "wsd", "decay_steps": 1}
    fsdp = {"groups": ["model.layers.*"]} if "dp_shard" in mesh else {}
    tables = {**PLAN.to_dict(), "mesh": mesh, "fsdp": fsdp, "optimizer": optimizer, "schedule": schedule}
    result = verify(ParallelPlan.from_dict(tables), tolerance=1e-9)
    assert result.passed, result.first


@on_ranks(2)
def test_rows_stand_in_forward_order():
    result = verify(PLAN, steps=1)
    assert result.passed
    assert (result.ranks, len(result.steps), len(result.losses)) == (2, 1, 1)
    names = [row.module for row in result.rows]
    layer = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["post_attention_layernorm", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj"]
    assert names == [
        "model.embed_tokens",
        "model.rotary_emb",
        *(f"model.layers.{index}.{name}" for index in range(2) for name in layer),
        "model.norm",
        "lm_head",
    ]


def test_a_wrong_output_decides_before_gradients_of_earlier_modules():
    rows = (ModuleDifference("embed", 0.0, 1e-3, 1e-3), ModuleDifference("mlp", 1e-5, 1e-3, 0.0))
    later = (ModuleDifference("embed", 1e-2, 1e-3, 1e-3), ModuleDifference("mlp", 1e-5, 1e-3, 0.0))
    result = VerifyResult((rows, later), (0.0, 1e-3), 1e-9, 2)
    assert result.first == "mlp"
    assert result.rows == (ModuleDifference("embed", 1e-2, 1e-3, 1e-3), rows[1])
    assert result.largest == 1e-2
    assert VerifyResult((rows[:1],), (0.0,), 1e-9, 2).first == "embed"
    assert VerifyResult(((),), (1e-3,), 1e-9, 2).first is None
    assert not VerifyResult(((),), (1e-3,), 1e-9, 2).passed


def test_float32_becomes_float64_wherever_it_is_asked_for():
    x = torch.ones(2, dtype=torch.float64)
    with Float64():
        made = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            torch.softmax(x, 0, dtype=torch.float32),
            torch.arange(3, dtype=torch.float),
        ]
    assert {tensor.dtype for tensor in made} == {torch.float64}
    assert x.float().dtype is torch.float32


def test_grouped_products_have_a_fallback_for_float64():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    b = torch.randn(3, 4, 2, dtype=torch.float64, generator=generator)
    ends = torch.tensor([2, 2, 4], dtype=torch.int32)  # An empty group, and a row of no group.
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    with Float64():
        made = function(a, b, offs=ends)
    torch.testing.assert_close(made[:2], a[:2] @ b[0])
    torch.testing.assert_close(made[2:4], a[2:4] @ b[2])
    assert made.shape == (5, 2)
    made.sum().backward()
    assert a.grad is not None and a.grad[4].abs().max() == 0


def test_dropout_is_left_out_and_said():
    x = torch.ones(4, 4, dtype=torch.float64)
    with Float64() as mode:
        assert torch.equal(torch.nn.Dropout(0.25)(x), x)
        assert torch.equal(torch.nn.Dropout(0.25).eval()(x), x)
        q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
        attention = torch.nn.functional.scaled_dot_product_attention
        assert torch.equal(attention(q, q, q, dropout_p=0.5), attention(q, q, q))
    assert mode.notes == [
        "dropout of p = 0.25 was set to 0: two programs don't draw alike",
        "scaled_dot_product_attention of p = 0.5 was set to 0: two programs don't draw alike",
    ]


def test_what_is_drawn_is_said():
    with Float64() as mode:
        assert torch.rand([]).shape == () and not mode.notes  # of what is built
        mode.trains = True
        assert torch.rand([]).item() == torch.rand(()).item() == 0.5
        torch.rand(2, generator=torch.Generator())
        torch.rand(2)
        torch.ones(2).bernoulli_()
    text = "{} was called: two programs don't draw alike, so differences may be of chance"
    layers = "torch.rand([]), as layers are dropped by, gave 0.5: two programs don't draw alike"
    assert mode.notes == [layers, text.format("rand"), text.format("bernoulli_")]


@on_ranks(2)
def test_a_gradient_that_is_rounding_errors_alone_is_no_difference():
    """The bias of keys changes nothing that a softmax sees."""
    overrides = {"vocab_size": 16, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    overrides |= {"word_embed_proj_dim": 16, "max_position_embeddings": 16}
    tables = {**PLAN.to_dict(), "model": {"config": "OPTConfig", "overrides": overrides}}
    result = verify(ParallelPlan.from_dict(tables))
    assert result.passed, (result.first, result.largest)


@on_ranks(2)
def test_a_loss_alone_that_differs_is_seen():
    """Of the size of a rounding error of float32."""
    backward_loss = module.backward_loss
    module.backward_loss = lambda *args, **options: backward_loss(*args, **options) * (1 + 1e-8)
    try:
        result = verify(ParallelPlan.from_dict({**PLAN.to_dict(), "mesh": {"dp_shard": 2}, "fsdp": {"groups": [""]}}))
    finally:
        module.backward_loss = backward_loss
    assert not result.passed
    assert result.largest == pytest.approx(1e-8, rel=1e-3)


@on_ranks(2)
def test_what_is_compared_is_recomputed_and_swapped_as_the_plan_says():
    apply, seen = module.apply, []

    def noted(model, plan):
        seen.append(plan.memory)
        return apply(model, plan)

    module.apply = noted
    try:
        memory = {"recompute": ["model.layers.0"], "swap": ["model.layers.1"]}
        result = verify(ParallelPlan.from_dict(PLAN.to_dict() | {"memory": memory}))
    finally:
        module.apply = apply
    assert result.passed
    assert [(each.recompute, each.swap) for each in seen] == [(("model.layers.0",), ("model.layers.1",))]
