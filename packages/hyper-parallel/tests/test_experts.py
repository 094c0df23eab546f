"""Experts over ranks together with sharded parameters: two views of one world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from moe_runs import Run, judge

from hp_dtensor import DTensor, init_device_mesh
from hp_fsdp import StateDictOptions, clip_grad_norm_, fully_shard, set_model_state_dict
from hp_moe import ExpertParallel
from hp_pipeline import PipelinedModel, Schedule1F1B, ScheduleZBV, placed, split_model
from hp_plan.torch.compared import Float64
from hp_platform import get_platform
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.framework("torch")


def build(layers=2):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.to(device_type())


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_and_dense_parameters_get_the_gradients_of_one_process(shape, deterministic):
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("rest", "ep"))
    world = mesh["rest", "ep"]._flatten("world")
    single, model = build(), build()
    for layer in model.model.layers:
        parallelize_module(layer.mlp.experts, mesh["ep"], ExpertParallel())
        fully_shard(layer.mlp.experts, mesh["rest"], deterministic=deterministic)
        fully_shard(layer, world, deterministic=deterministic)
    fully_shard(model, world, deterministic=deterministic)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (single, model)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        tokens = torch.randint(64, (8, 5), generator=generator).to(device_type())
        with Float64():
            loss = single(tokens, labels=tokens).loss
            loss.backward()
            own = tokens.chunk(4)[dist.get_rank()]
            model(own, labels=own).loss.backward()
        for (key, one), other in zip(single.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-10, atol=1e-12, msg=key)
        norm = clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5), rtol=1e-10, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, one), other in zip(single.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), one, rtol=1e-10, atol=1e-12, msg=key)


@on_ranks(4)
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBV])
def test_experts_in_stages_of_a_pipeline_get_the_gradients_of_one_process(kind):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "ep"))
    single, model = build(4), build(4)
    placement = placed(kind.shape, 2)
    split = split_model(model, len(placement))
    own = [index for index, place in enumerate(placement) if place == mesh.get_local_rank("pp")]
    for index in own:
        for module in split.stage(index).modules():
            if type(module).__name__ == "Qwen3MoeExperts":
                parallelize_module(module, mesh["ep"], ExpertParallel())
    stages = PipelinedModel(kind([split.pipeline_stage(each) for each in own], 2, group=mesh.get_group("pp")))
    tokens = torch.randint(64, (8, 5), generator=torch.Generator().manual_seed(1)).to(device_type())
    with Float64():
        loss = single(tokens, labels=tokens).loss
        loss.backward()
        part = tokens.chunk(2)[mesh.get_local_rank("ep")]
        stages.run(part, labels=part)
    expected = dict(single.named_parameters())
    for key, parameter in stages.named_parameters():
        if isinstance(parameter, DTensor):
            gradient = parameter.grad.full_tensor() / 2
        else:
            gradient = parameter.grad
            get_platform().collectives.all_reduce(gradient, "avg", group=mesh.get_group("ep"))
        torch.testing.assert_close(gradient, expected[key].grad, rtol=1e-10, atol=1e-12, msg=key)


@on_ranks(4)
@pytest.mark.parametrize(
    "run",
    [
        Run("GptOssConfig", "ep2 x fsdp2", "empty", num_experts=2),  # more ranks than experts
        Run("MixtralConfig", "ep2 x fsdp2 on dim 1", num_experts=3, auxiliary=True),
        Run("Glm4MoeConfig", "ep4 x fsdp4", "one", num_experts=8, checkpointed=True),
        Run("Qwen3NextConfig", "ep2 x pp2", "empty"),
        Run("DeepseekV3Config", "ep2 x pp2", "one", "exact", checkpointed=True),
    ],
    ids=lambda run: f"{run.family} {run.product}",
)
def test_families_beside_sharded_parameters_and_in_stages_equal_one_process(run):
    assert judge(run) == "right"


@on_ranks(4)
def test_experts_spread_unevenly_are_not_cut_into_ranges():
    said = judge(Run("MixtralConfig", "ep2 x fsdp2", num_experts=3))
    assert said.startswith("refused: fully_shard: parameter 'gate_up_proj' is spread unevenly over")
    assert "shard another dim, with shard_placement_fn=lambda parameter: Shard(1)" in said


@on_ranks(4)
@pytest.mark.parametrize("meta", [False, True])
def test_each_rank_loads_its_own_experts(meta):
    """transformers PR 45662: all ranks got the experts of rank 0, and trained on."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("rest", "ep"))
    world = mesh["rest", "ep"]._flatten("world")
    source = {name: value.clone() for name, value in build().state_dict().items()}
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if meta:
        model.to("meta")
    for layer in model.model.layers:
        parallelize_module(layer.mlp.experts, mesh["ep"], ExpertParallel())
        fully_shard(layer.mlp.experts, mesh["rest"])
        fully_shard(layer, world)
    fully_shard(model, world)
    if meta:
        model.to_empty(device=device_type())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source if dist.get_rank() == 0 else {}, options=options)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), source[name], rtol=0, atol=0, msg=name)
    experts = model.model.layers[0].mlp.experts
    experts.unshard()
    here = source["model.layers.0.mlp.experts.down_proj"].chunk(2)[mesh.get_local_rank("ep")]
    torch.testing.assert_close(experts.down_proj.to_local(), here, rtol=0, atol=0)
