"""Experts over ranks of which each has a part of the sequence: tokens are rows, wherever they stand."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_moe import ExpertParallel
from hp_plan.torch.compared import Float64
from hp_platform import get_platform
from hp_styles import ContextParallel, context_parallel_shard, parallelize_module
from hp_testing import device_type, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.framework("torch")

LENGTH = 8
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "num_experts_per_tok": 2,
    "attn_implementation": "sdpa",
    "experts_implementation": "eager",
}


def build(family):
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

    if family == "qwen3_moe":
        config = Qwen3MoeConfig(num_experts=8, moe_intermediate_size=8, **SIZES)
    else:
        config = MixtralConfig(num_local_experts=4, intermediate_size=12, **SIZES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.to(device_type())


def loss_of(model, batch):
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


@on_ranks(4)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("shape", "over", "degree"),
    [((2, 2), "cp", 1), ((2, 2), "dp", 2), ((2, 2), "all", 1), ((1, 4), "all", 1), ((1, 4), "cp", 2)],
)
def test_gradients_are_those_of_one_process(family, shape, over, degree):
    mesh = init_device_mesh(device_type(), (1, *shape), mesh_dim_names=("one", "dp", "cp"))
    world = mesh["dp", "cp"]._flatten("world")
    experts, rest = (world, mesh["one"]) if over == "all" else (mesh[over], mesh["cp" if over == "dp" else "dp"])
    single = build(family)
    model = copy.deepcopy(single)
    style = ContextParallel(ulysses_degree=degree, load_balance=True)
    parallelize_module(model, mesh["cp"], {"model.layers.*.self_attn": style})
    for layer in model.model.layers:
        parallelize_module(layer.mlp.experts, experts, ExpertParallel())
        fully_shard(layer.mlp.experts, rest)
        fully_shard(layer, world)
    fully_shard(model, world)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(32, (4, LENGTH + 1), generator=generator).to(device_type())
    places = torch.arange(LENGTH, device=device_type()).expand(4, -1)
    targets = ids[:, 1:].masked_fill(torch.arange(4, device=device_type())[:, None] * 2 > places, -100)
    batch = {"input_ids": ids[:, :-1], "position_ids": places, "targets": targets}
    count = (targets != -100).sum()
    part = {name: x.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for name, x in batch.items()}
    with Float64():
        loss = loss_of(single, batch) / count
        loss.backward()
        own = loss_of(model, context_parallel_shard(part, mesh["cp"], load_balance=True)) * 4 / count
        own.backward()
    mean = own.detach().clone()
    get_platform().collectives.all_reduce(mean, "avg", group=world.get_group())
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-10, atol=0)
    for (key, one), other in zip(single.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-10, atol=1e-12, msg=key)


@on_ranks(2)
def test_experts_without_a_group_of_their_own_are_refused():
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("rest", "ep"))
    model = build("mixtral")
    for over in (mesh["ep"], mesh["rest", "ep"]._flatten("world")):
        layer = copy.deepcopy(model.model.layers[0])
        parallelize_module(layer.mlp.experts, mesh["ep"], ExpertParallel())
        with pytest.raises(
            ValueError, match="'mlp.experts.gate_up_proj' of experts is spread over .* no group of its own"
        ):
            fully_shard(layer, over)
        fully_shard(layer.mlp.experts, mesh["rest"])
        fully_shard(layer, over)
