"""[memory] homes of a plan: parameters on the host, with the same bits, and what can't have them."""

from __future__ import annotations

import pytest
import torch

from hp_plan import ParallelPlan, PlanError, apply, build_model, build_optimizer, dry_run, lint
from hp_plan.port import models
from hp_plan.structure.memory import host_bytes, training_bytes
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HOMES = {"model.layers.*": "host"}


def llama(**sections) -> ParallelPlan:
    return ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": SMALL}, **sections})


def trained(plan: ParallelPlan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    model = apply(build_model(plan, device=device_type()), plan)
    optimizer = build_optimizer(plan, model.named_parameters())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    layers = [each for name, each in model.named_parameters() if ".layers." in name]
    if plan.memory.homes:
        assert layers and all(type(each) is torch.nn.Parameter and each.device.type == "cpu" for each in layers)
    return losses


@on_ranks(1)
@pytest.mark.parametrize("recompute", [(), ("model.layers.*",)])
def test_an_unmodified_model_trains_from_the_host(recompute) -> None:
    plain = trained(llama(memory={"recompute": recompute}))
    placed = trained(llama(memory={"recompute": recompute, "homes": HOMES, "cache": "40KiB"}))
    torch.testing.assert_close(placed, plain, rtol=1e-5, atol=1e-6)


def test_bytes_of_the_device_and_of_the_host() -> None:
    plan, placed = llama(), llama(memory={"homes": HOMES, "cache": "20 KiB"})
    outline = models().outline(build_model(plan, device="meta"))
    model = build_model(plan, device="meta")
    layers = sum(each.numel() for each in model.model.layers.parameters())
    on_host = host_bytes(placed, outline)
    assert on_host == training_bytes(plan, outline) * layers // outline.elements
    assert training_bytes(placed, outline) == training_bytes(plan, outline) - on_host + 20 * 1024
    assert host_bytes(plan, outline) == 0


def test_plans_with_homes(tmp_path) -> None:
    plan = llama(memory={"homes": HOMES, "cache": "1MiB"})
    assert plan.memory.homes == HOMES and lint(plan) == ()
    (path := tmp_path / "plan.toml").write_text(plan.to_toml())
    assert ParallelPlan.from_toml(path) == plan
    with pytest.raises(PlanError, match="a dry run does not count parameters that live on the host"):
        dry_run(plan)


REFUSED = {
    "nothing": ({"homes": {"model.layer.*": "host"}}, {}, r"'model.layer.\*' matches no module"),
    "list": ({"homes": {"model.layers": "host"}}, {}, "model.layers"),
    "unknown": ({"homes": {"model.layers.*": "disk"}}, {}, "got 'disk'; the one home is 'host'"),
    "neighbour": ({"homes": {"model.layers.*": "neighbour"}}, {}, "not built yet; the one home is 'host'"),
    "inside": (
        {"homes": {"model.layers.*": "host", "model.layers.*.mlp": "host"}},
        {},
        r"'model.layers.\*.mlp' matches model.layers.0.mlp, and 'model.layers.\*' matches model.layers.0",
    ),
    "cache": ({"homes": HOMES, "cache": "1KiB"}, {}, "got 1KiB, and the parameters of model.layers.0 take"),
    "size": ({"homes": HOMES, "cache": "1 gig"}, {}, "got '1 gig', expected a number and a unit"),
    "alone": ({"cache": "1GiB"}, {}, "which nothing uses without homes"),
    "budget": ({"homes": HOMES, "budget": "1GiB"}, {}, "got homes with a budget"),
    "mesh": ({"homes": HOMES}, {"mesh": {"dp_shard": 2}}, "got homes with the mesh .*, which shards"),
    "offload": ({"homes": HOMES}, {"fsdp": {"offload": True}}, "got homes with fsdp.offload"),
    "states": ({"homes": HOMES}, {"optimizer": {"swap_slices": 4}}, "got homes with swap_slices"),
    "compile": ({"homes": HOMES}, {"compile": {"blocks": ["model.layers.*"]}}, "got homes with blocks to compile"),
    "dtype": ({"homes": HOMES}, {"fsdp": {"param_dtype": "bfloat16"}}, "got homes with param_dtype"),
    "deterministic": ({"homes": HOMES}, {"run": {"deterministic": True}}, "got homes with deterministic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name) -> None:
    memory, sections, match = REFUSED[name]
    found = [each for each in lint(llama(memory=memory, **sections)) if each.key.startswith("memory.")]
    assert len(found) == 1, found
    with pytest.raises(PlanError, match=match):
        raise PlanError(found)
