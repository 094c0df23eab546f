"""A transformers model in stages under a plan does what it does in one process: loss, every gradient, every weight."""

from __future__ import annotations

import pytest
import torch

import hp_fsdp
from hp_pipeline import PipelinedModel
from hp_plan import ParallelPlan, PlanError, apply, build_model, verify
from hp_plan.extend import data_parallel_rows
from hp_plan.torch.training.parts import Part
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

TOLERANCE = 1e-10
OTHERS = ("interleaved", "zb2p", "dualpipev")
BERT = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
UNTIED = {"tie_word_embeddings": False}
BLOCKS = {f"model.layers.{index}.mlp.down_proj" for index in range(2)}


def small_plan(mesh, pipeline=(), config="LlamaConfig", sections=(), layers=2, **overrides) -> ParallelPlan:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": layers}
    parts = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    return ParallelPlan.from_dict(
        {
            "model": {"config": config, "overrides": {**heads, **sizes, **overrides}},
            "mesh": mesh,
            "pipeline": dict(pipeline),
            "fsdp": {"groups": ["model.layers.*"]} if parts > 1 else {},
            "data": {"batch_size": 4 * parts, "sequence_length": 8},
            "run": {"grad_clip": 0.5},
            **dict(sections),
        }
    )


def check(plan: ParallelPlan, modules=BLOCKS | {"model.embed_tokens", "lm_head"}) -> None:
    result = verify(plan, tolerance=TOLERANCE)
    assert result.passed, f"{result.first} differs: {result.largest:.1e}"
    assert modules <= {row.module for row in result.rows}


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize(
    "schedule",
    # hp-pipeline compares every schedule with one process.
    ["1f1b", "zbv", "hanayo", "auto", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)],
)
def test_schedules(schedule):
    layers = {"1f1b": 2, "zb2p": 2, "hanayo": 8}.get(schedule, 4)
    check(small_plan({"pp": 2}, {"schedule": schedule}, layers=layers))


@on_ranks(3)
def test_stages_of_the_plans_own_sizes():
    check(small_plan({"pp": 3}, {"split": [1, 2, 1], "micro_batches": 2}, layers=4))


@on_ranks(4)
@pytest.mark.parametrize("axis", ["dp_shard", "tp", pytest.param("dp_replicate", marks=pytest.mark.thorough)])
def test_tied_weights_on_two_axes(axis):
    check(small_plan({"pp": 2, axis: 2}, {"micro_batches": 2}, tie_word_embeddings=True))


@on_ranks(4)
@pytest.mark.parametrize("sections", [{"styles": "auto-sequence"}, {"optimizer": {"name": "muon"}}], ids=str)
def test_tensor_parallel_stages(sections):
    check(small_plan({"pp": 2, "tp": 2}, {"schedule": "zbv"}, sections=sections, layers=4))


@on_ranks(8)
def test_three_axes():
    check(small_plan({"pp": 2, "dp_shard": 2, "tp": 2}, config="Qwen3Config"))


@on_ranks(2)
@pytest.mark.parametrize(
    ("config", "overrides", "module"),
    [
        ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "model.layers.1.mlp.experts"),
        ("GPTNeoXConfig", {}, "gpt_neox.layers.1.mlp.act"),
    ],
)
def test_families(config, overrides, module):
    check(small_plan({"pp": 2}, config=config, **overrides), {module})


@on_ranks(2)
def test_a_rank_has_its_stages_alone():
    plan = small_plan({"pp": 2})
    model = apply(build_model(plan), plan)
    rank = get_platform().groups.rank()
    assert isinstance(model, PipelinedModel)
    assert {name.split(".")[2] for name in model.state_dict() if ".layers." in name} == {str(rank)}
    assert ("lm_head.weight" in model.state_dict()) == (rank == 1)
    assert model.schedule.micro_batch_num == 4 and data_parallel_rows(plan) == slice(0, 4)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    assert len(model.run(input_ids=tokens, labels=tokens)) == (4 if rank else 0)


@on_ranks(4)
def test_a_tied_weight_in_two_groups_of_one_rank_is_refused():
    plan = small_plan({"pp": 2, "dp_shard": 2}, {"schedule": "zbv"}, layers=4, tie_word_embeddings=True)
    with pytest.raises(PlanError, match="stages 0 and 3 share model.embed_tokens.weight, and are on one rank, whose"):
        apply(build_model(plan), plan)


@on_ranks(4)
def test_a_bias_that_a_shared_head_shares_with_another_module_is_refused():
    plan = ParallelPlan.from_dict(
        {
            "model": {"config": "BertConfig", "task": "masked-lm", "overrides": BERT},
            "mesh": {"pp": 2, "dp_shard": 2},
            "data": {"batch_size": 4},
        }
    )
    with pytest.raises(PlanError, match=r"stages share cls\.predictions\.decoder\.weight, so .* but .*bias is"):
        apply(build_model(plan), plan)
    tables = {**plan.to_dict(), "model": {**plan.to_dict()["model"], "overrides": {**BERT, **UNTIED}}}
    plan = ParallelPlan.from_dict(tables)
    result = verify(plan, tolerance=TOLERANCE)
    assert result.passed, result.first


@on_ranks(4)
def test_a_stage_that_cannot_be_sharded_is_refused_on_all_ranks():
    plan, rank = small_plan({"pp": 2, "dp_shard": 2}), get_platform().groups.rank()
    fully_shard = hp_fsdp.fully_shard

    def refuse(module, **options):
        raise ValueError("no such layer")

    hp_fsdp.fully_shard = refuse if rank >= 2 else fully_shard
    try:
        with pytest.raises(ValueError, match="no such layer" if rank > 1 else "apply: the stages of rank 2: .*no such"):
            apply(build_model(plan), plan)
    finally:
        hp_fsdp.fully_shard = fully_shard


@on_ranks(2)
def test_a_weight_that_no_rank_has_is_a_difference():
    own = Part.parameters
    Part.parameters = lambda self: {name: each for name, each in own(self).items() if name != "model.norm.weight"}
    try:
        result = verify(small_plan({"pp": 2}), steps=1)
    finally:
        Part.parameters = own
    assert not result.passed and result.first == "model.norm"


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_in_stages():
    peft = pytest.importorskip("peft")

    def with_adapters():
        torch.manual_seed(1)
        adapters = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
        return peft.get_peft_model(build_model(plan), adapters)

    plan = small_plan({"pp": 2}, sections={"run": {"dtype": "float64"}})
    tokens = torch.arange(32).view(4, 8) % 24
    whole, model = with_adapters(), apply(with_adapters(), plan)
    whole(input_ids=tokens, labels=tokens).loss.backward()
    model.run(input_ids=tokens, labels=tokens)
    expected = dict(whole.get_base_model().named_parameters())
    trained = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert len(trained) == 4 and all("lora" in name for name in trained)
    for name, gradient in trained.items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-5, atol=1e-6)
