"""Adapters of peft, added before a plan is applied or after it: trained as in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hp_dtensor import DTensor, Shard, init_device_mesh
from hp_moe import ExpertPlacement, place_experts
from hp_plan import ParallelPlan, apply, build_model
from hp_plan.torch.compared import Float64
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
MESHES = {
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
}


def plan_of(mesh: dict[str, int], styles: str = "auto") -> ParallelPlan:
    sections: dict[str, Any] = {"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}
    model = {"config": "LlamaConfig", "overrides": SMALL}
    return ParallelPlan.from_dict(
        {"model": model, "mesh": mesh, "styles": styles, "run": {"dtype": "float64"}, **sections}
    )


def adapted(model: nn.Module, target: Any = "all-linear", **options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=target, init_lora_weights=False, **options)
    with warnings.catch_warnings():  # peft 0.21 reads a name that transformers 5.23 calls deprecated
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def compare(reference: nn.Module, model: nn.Module, mesh: dict[str, int]) -> None:
    """Three steps; each gradient after each of them."""
    parts = mesh.get("dp_shard", 1)
    part = torch.distributed.get_rank() // mesh.get("tp", 1) if parts > 1 else 0
    trained = [[p for p in net.parameters() if p.requires_grad] for net in (reference, model)]
    assert len(trained[0]) == len(trained[1]) > 0
    optimizers = [torch.optim.SGD(parameters, lr=0.5) for parameters in trained]
    for step in range(3):
        tokens = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(step)).to(device_type())
        expected = reference(input_ids=tokens, labels=tokens).loss
        expected.backward()
        own = tokens.chunk(parts)[part]
        model(input_ids=own, labels=own).loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(whole(gradients[name]), parameter.grad, atol=1e-10, rtol=1e-10, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check(mesh: dict[str, int], styles: str = "auto", **options: Any) -> None:
    plan = plan_of(mesh, styles)
    for order in ("before", "after"):
        reference = adapted(build_model(plan, device=device_type()), **options)
        model = build_model(plan, device=device_type())
        model = apply(adapted(model, **options), plan) if order == "before" else adapted(apply(model, plan), **options)
        compare(reference, model, mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize("mesh", ["fsdp", "tp"])
def test_adapters_on_two_ranks(mesh: str):
    check(MESHES[mesh])


@on_ranks(2)
def test_adapters_with_sequence_parallel():
    check({"tp": 2}, "auto-sequence")


@on_ranks(4)
def test_adapters_on_both_axes():
    check(MESHES["fsdp x tp"])


@on_ranks(2)
@pytest.mark.parametrize("mesh", ["fsdp", "tp"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_forward_without_adapters_between_another_and_its_backward(order: str, mesh: str):
    # trl's DPOTrainer, given a peft_config, makes the reference model of it; peft freezes the adapters for that long.
    plan = plan_of(MESHES[mesh])
    reference: Any = adapted(build_model(plan, device=device_type()))
    model: Any = build_model(plan, device=device_type())
    model = apply(adapted(model), plan) if order == "before" else adapted(apply(model, plan))
    tokens = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(0)).to(device_type())
    own = tokens.chunk(2)[torch.distributed.get_rank()] if mesh == "fsdp" else tokens
    for net, rows in ((reference, tokens), (model, own)):
        logits = net(input_ids=rows).logits
        with torch.no_grad(), net.disable_adapter():
            before = net(input_ids=rows).logits
        (logits - before).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.any()
            torch.testing.assert_close(whole(gradients[name]), parameter.grad, atol=1e-10, rtol=1e-10, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("mesh", ["fsdp"])
def test_modules_trained_beside_adapters(mesh: str):
    check(MESHES[mesh], target=["q_proj"], modules_to_save=["lm_head"])


@on_ranks(2)
def test_a_wrapped_linear_is_a_linear_to_styles():
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
        nets.append(get_peft_model(Mlp().to(device_type(), torch.float64), config, autocast_adapter_dtype=False))
    reference, model = nets
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    parallelize_module(model.get_base_model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert model.get_base_model().up.base_layer.weight.placements == (Shard(0),)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device_type())
    for net in nets:
        net(x).square().sum().backward()
    for (name, a), b in zip(reference.named_parameters(), model.parameters(), strict=True):
        if a.requires_grad:
            torch.testing.assert_close(whole(b.grad), a.grad, atol=1e-10, rtol=1e-10, msg=name)


@on_ranks(2)
@pytest.mark.parametrize(
    "mesh", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"dp_replicate": 2}], ids=str
)
@pytest.mark.parametrize("config", ["Qwen3MoeConfig", "GptOssConfig"])
def test_adapters_of_the_parameters_of_experts(config: str, mesh: dict[str, int]):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_local_experts": 4}
    if config == "GptOssConfig":  # weights that are [experts, in, out]
        del sizes["num_experts"], sizes["moe_intermediate_size"]
    else:
        del sizes["num_local_experts"]
    model = {"config": config, "overrides": {**SMALL, **sizes, "num_hidden_layers": 1}}
    fsdp = {"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}
    plan = ParallelPlan.from_dict({"model": model, "mesh": mesh, "run": {"dtype": "float64"}, **fsdp})
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with Float64():
        late = adapted(apply(build_model(plan, device=device_type()), plan), ["q_proj"], target_parameters=targets)
        with pytest.raises((RuntimeError, NotImplementedError), match=r"target_parameters.* before hp_plan\.apply"):
            late(input_ids=torch.arange(12, device=device_type()).view(2, 6))
        reference: Any = adapted(build_model(plan, device=device_type()), ["q_proj"], target_parameters=targets)
        sharded: Any = apply(
            adapted(build_model(plan, device=device_type()), ["q_proj"], target_parameters=targets), plan
        )
        compare(reference, sharded, mesh)
        rows = torch.arange(12, device=device_type()).view(2, 6)
        with torch.no_grad():
            adapting = sharded(input_ids=rows).logits
            with sharded.disable_adapter(), reference.disable_adapter():
                assert not torch.equal(sharded(input_ids=rows).logits, adapting)
                torch.testing.assert_close(sharded(input_ids=rows).logits, reference(input_ids=rows).logits)
        if "ep" in mesh and "dp_shard" not in mesh:
            experts = sharded.get_base_model().model.layers[0].mlp.experts.get_base_layer()
            with pytest.raises(NotImplementedError, match="adapters of their parameters would stay"):
                place_experts(experts, ExpertPlacement((1, 0, 1, 0), ((),) * 4, 2), optimizer=())
            place_experts(experts, ExpertPlacement((0, 0, 1, 1), ((),) * 4, 2), optimizer=())
