from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh
from hp_fsdp import HSDPModule
from hp_plan import ParallelPlan, PlanError, ScheduleSection, apply, build_model, build_optimizer, build_schedule
from hp_plan.sections import schedule_factor
from hp_testing import device_type, on_ranks

SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


FLOAT64 = {"dtype": "float64"}


def llama(mesh, styles="auto", overrides=(), **sections):
    model = {"config": "LlamaConfig", "overrides": {**SMALL, **dict(overrides)}}
    return ParallelPlan.from_dict({"model": model, "mesh": mesh, "styles": styles, **sections})


@pytest.mark.smoke
@on_ranks(2)
def test_what_goes_in_and_comes_out_is_plain():
    plan = llama({"tp": 2})
    model = apply(build_model(plan, device=device_type()), plan)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    tokens = torch.arange(8, device=device_type()).view(1, 8)
    output = model(input_ids=tokens, labels=tokens)
    assert type(output.loss) is torch.Tensor
    assert type(output.logits) is torch.Tensor
    assert output.logits.shape == (1, 8, 16)
    assert output["loss"] is output.loss
    assert math.isfinite(output.loss.item())
    output.loss.backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    assert type(model(tokens, return_dict=False)[0]) is torch.Tensor
    with pytest.raises(NotImplementedError, match=r"cannot be pickled.*Save module.state_dict\(\)"):
        pickle.dumps(model)


@on_ranks(2)
def test_styles_decide_the_placements():
    plan = llama({"tp": 2})
    model = apply(build_model(plan, device=device_type()), plan)
    attention, norm = model.model.layers[0].self_attn, model.model.norm
    assert attention.q_proj.weight.placements == (Shard(0),)
    assert attention.o_proj.weight.placements == (Shard(1),)
    assert model.model.embed_tokens.weight.placements == (Shard(0),)
    assert norm.weight.placements == (Replicate(),)


@on_ranks(2)
@pytest.mark.parametrize("styles", ["auto", {"lm_head": "colwise_gather_output"}, {"model.norm": "replicate"}])
def test_tied_weights_stay_tied(styles):
    if styles == {"lm_head": "colwise_gather_output"}:
        styles = {**styles, "model.embed_tokens": "embedding_rowwise"}
    plan = llama({"tp": 2}, styles, {"tie_word_embeddings": True})
    model = apply(build_model(plan, device=device_type()), plan)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, DTensor)


@on_ranks(2)
@pytest.mark.parametrize(("groups", "sharded"), [([], {"model.layers.0", "model.layers.1"}), ([""], set())])
def test_the_blocks_are_groups_unless_the_plan_says_otherwise(groups, sharded):
    plan = llama({"dp_shard": 2}, overrides={"num_hidden_layers": 2}, fsdp={"groups": groups})
    applied = apply(build_model(plan, device=device_type()), plan)
    found = {name for name, module in applied.named_modules() if name and isinstance(module, HSDPModule)}
    assert found == sharded
    assert isinstance(applied, HSDPModule)


@on_ranks(2)
def test_frozen_parameters_stay_frozen():
    plan = llama({"tp": 2})
    model = build_model(plan, device=device_type())
    model.model.norm.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    model = apply(model, plan)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert sorted(frozen) == ["lm_head.weight", "model.norm.weight"]
    assert len(build_optimizer(plan, model.parameters()).param_groups[0]["params"]) == len(list(model.parameters())) - 2


@on_ranks(2)
def test_activation_checkpointing_recomputes_under_the_plan():
    plan = llama({"tp": 2}, run={"dtype": "float64"})
    tokens = torch.arange(8, device=device_type()).view(1, 8)
    gradients = []
    for checkpointing in (False, True):
        model = apply(build_model(plan, device=device_type()), plan).train()
        if checkpointing:
            # Renamed in the course of transformers 5.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_an_error_inside_the_model_leaves_no_trace():
    plan = llama({"tp": 2})
    model = apply(build_model(plan, device=device_type()), plan)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(input_ids=None)
    embedding = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="implicit_replication"):
        embedding + torch.ones(16, 16, device=device_type())


@on_ranks(2)
def test_a_mesh_that_does_not_fit():
    with pytest.raises(PlanError, match="the mesh tp 4 has 4 ranks, but there are 2; start 4 ranks"):
        apply(nn.Linear(4, 4), ParallelPlan.from_dict({"mesh": {"tp": 4}, "styles": {"": "colwise"}}))
    plan = ParallelPlan.from_dict({"mesh": {"dp_shard": 2}})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    with pytest.raises(
        ValueError, match=r"the mesh has axes {'data': 2}, the plan needs {'dp_shard': 2}: leave the mesh"
    ):
        apply(nn.Linear(4, 4), plan, mesh)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    assert isinstance(apply(nn.Linear(4, 4), plan, mesh).weight, DTensor)


@on_ranks(2)
def test_shapes_that_do_not_divide_are_found_on_every_rank_before_anything_is_sent():
    plan = llama({"tp": 2}, overrides={"num_key_value_heads": 1})
    with pytest.raises(PlanError) as raised:
        apply(build_model(plan, device=device_type()), plan)
    assert [diagnostic.message for diagnostic in raised.value.diagnostics] == [
        f"model.layers.*.self_attn.{name} has 1 heads of size 4, which tp = 2 does not divide"
        for name in ("k_proj", "v_proj")
    ]


@on_ranks(2)
def test_a_model_without_experts_is_not_spread():
    with pytest.raises(PlanError, match="ep = 2, but Linear .model_type None. has no expert parallel plan"):
        apply(nn.Linear(4, 4), ParallelPlan.from_dict({"mesh": {"dp_shard": 2, "ep": 2}}))


@on_ranks(2)
def test_sharding_options_on_a_mesh_that_shards_nothing_are_refused():
    plan = llama({"tp": 2}, fsdp={"param_dtype": "bfloat16"})
    with pytest.raises(
        PlanError, match="fsdp: param_dtype would have no effect: the mesh tp 2 shards over no dp_shard"
    ):
        apply(build_model(plan, device=device_type()), plan)


def test_without_a_process_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        RuntimeError, match="needs 2 ranks, but no launcher started this .* torchrun --standalone --nproc-per-node 2"
    ):
        apply(nn.Linear(4, 4), ParallelPlan.from_dict({"mesh": {"dp_shard": 2}}))


def test_the_same_seed_builds_the_same_model():
    plan = llama({})
    one, two = build_model(plan), build_model(plan)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert torch.get_default_dtype() is torch.float32
    assert {parameter.device.type for parameter in build_model(plan, device="meta").parameters()} == {"meta"}
    assert build_model(plan, dtype=torch.bfloat16).lm_head.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("section", "factors"),
    [
        (ScheduleSection("constant", warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (ScheduleSection("linear", warmup_steps=2), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (ScheduleSection("linear", final=0.4), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]),
        (ScheduleSection("cosine", warmup_steps=2), [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
        (ScheduleSection("wsd", warmup_steps=2, decay_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 0.5]),
        (
            ScheduleSection("wsd", decay_steps=4, decay="minus_sqrt", final=0.5),
            [1.0, 1.0, 1.0, 0.75, 0.6464466, 0.5669873],
        ),
    ],
)
def test_the_learning_rate_follows_the_schedule(section, factors):
    assert [schedule_factor(section, step, 6) for step in range(6)] == pytest.approx(factors)
    plan = ParallelPlan(schedule=section)
    optimizer = build_optimizer(plan, nn.Linear(2, 2).parameters())
    build_schedule(plan, optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(factors[0] * plan.optimizer.lr)


NORM = {"patterns": ["model.norm.*"], "weight_decay": 0.0}


def test_muon_trains_the_hidden_matrices_and_adamw_the_rest():
    plan = llama({}, optimizer={"name": "muon", "lr": 0.02, "muon_momentum": 0.9, "groups": [NORM]})
    model = build_model(plan)
    optimizer = build_optimizer(plan, model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [(group["weight_decay"], [names[id(p)] for p in group["params"]]) for group in optimizer.param_groups]
    assert list(optimizer.optimizers) == ["muon", "adamw"] and optimizer.param_groups[0]["momentum"] == 0.9
    assert len(groups[0][1]) == 7 and all("proj" in name for name in groups[0][1])
    assert groups[1] == (
        0.01,
        ["model.embed_tokens.weight", *(n for n in groups[1][1] if "layernorm" in n), "lm_head.weight"],
    )
    assert groups[2] == (0.0, ["model.norm.weight"])
    schedule = build_schedule(plan, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.02] * 3
    with pytest.raises(ValueError, match=r"name = 'muon' in \[optimizer\] goes by names of parameters; pass"):
        build_optimizer(plan, model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=["fsdp", "tp"])
def test_an_optimizer_made_before_trains_what_is_applied(mesh):
    optimizer_made_before(mesh)


@on_ranks(4)
def test_an_optimizer_made_before_trains_what_is_applied_to_both_axes():
    optimizer_made_before({"dp_shard": 2, "tp": 2})


def optimizer_made_before(mesh):
    plan = llama(mesh, **({"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}), run=FLOAT64)
    model, one = (build_model(plan, device=device_type()) for _ in range(2))
    optimizer, reference = (build_optimizer(plan, each.parameters()) for each in (model, one))
    before = list(model.parameters())
    model = apply(model, plan)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    tokens = torch.arange(32, device=device_type()).view(4, 8) % 16
    for _ in range(3):
        for module, each in ((model, optimizer), (one, reference)):
            module(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            each.step()
            each.zero_grad()
    for (name, got), want in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(
            got.full_tensor(), want, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )
