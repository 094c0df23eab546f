"""[memory] homes of a plan: parameters on the host, on one rank and several, and what can't have them."""

from __future__ import annotations

import pytest
import torch

import hp_fsdp
import hp_offload
from hp_offload import SwapManager
from hp_plan import (
    ParallelPlan,
    PlanError,
    apply,
    build_model,
    build_optimizer,
    build_parallel_model,
    lint,
    verify,
)
from hp_plan.features.homes import cache_elements
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
    "num_key_value_heads": 4,
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


@on_ranks(1)
def test_a_model_that_is_built_under_its_plan_is_the_whole_one_at_home() -> None:
    plan = llama(memory={"homes": HOMES}, data={"batch_size": 2, "sequence_length": 8})
    torch.testing.assert_close(build_parallel_model(plan).state_dict(), build_model(plan).state_dict(), rtol=0, atol=0)
    assert verify(plan, tolerance=1e-12).passed


@on_ranks(1)
@pytest.mark.parametrize("cache", [None, "40KiB"])
def test_a_budget_chooses_the_cache(cache, monkeypatch) -> None:
    """Of the bytes that what has no home leaves, activations and visiting parameters have both."""
    pytest.importorskip("scipy", reason="a budget needs scipy, which hp-plan depends on")
    seen, fit, place = [], hp_offload.fit_memory, hp_offload.place
    monkeypatch.setattr(hp_offload, "place", lambda *args, **named: seen.append(place(*args, **named)) or seen[-1])
    monkeypatch.setattr(hp_offload, "fit_memory", lambda *args, **named: seen.append(named) or fit(*args, **named))
    plan = llama(memory={"homes": HOMES, "cache": cache})
    outline = models().outline(build_model(plan, device="meta"))
    resident = training_bytes(plan, outline) - cache_elements(plan, outline) * 4
    budget = llama(memory={"homes": HOMES, "cache": cache, "budget": f"{resident + 160 * 1024} B", "bandwidth": 1e6})
    assert lint(budget) == ()
    losses = trained(budget)
    placed, named = seen
    assert named["placed"] is (placed if cache is None else None)
    report = placed.report()
    assert report.planned and report.peak <= report.cache
    largest = max(report.blocks.values())
    assert largest < report.cache < 160 * 1024 if cache is None else report.cache == 40 * 1024
    torch.testing.assert_close(losses, trained(llama()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_ranks_keep_to_a_budget_that_homes_leave_room_in(axis) -> None:
    pytest.importorskip("scipy", reason="a budget needs scipy, which hp-plan depends on")
    sections = {"mesh": {axis: 2}, "data": {"batch_size": 4, "sequence_length": 8}}
    outline = models().outline(build_model(llama(), device="meta"))
    plain, placed = (training_bytes(llama(memory={"homes": each}, **sections), outline) for each in ({}, HOMES))
    budget = placed + (plain - placed) // 2
    assert budget < plain, "on the device weights, gradients and states would take all of it"
    result = verify(llama(memory={"homes": HOMES, "budget": f"{budget} B"}, **sections), tolerance=1e-10)
    assert result.passed, (result.first, result.largest)


RANKS = {
    "sharded": {"mesh": {"dp_shard": 4}, "optimizer": {"name": "muon"}},
    "replicated": {"mesh": {"dp_replicate": 4}, "run": {"accumulate": 2}},
    "tensor": {"mesh": {"tp": 4}, "optimizer": {"name": "muon"}, "run": {"accumulate": 2, "grad_clip": 0.1}},
    "stages": {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "zbv"}, "run": {"grad_clip": 0.1}},
    "deterministic": {"mesh": {"dp_shard": 2, "dp_replicate": 2}, "run": {"deterministic": True, "accumulate": 2}},
    "stages, replicated": {"mesh": {"pp": 2, "dp_replicate": 2}},
    "context": {"mesh": {"cp": 4}, "run": {"accumulate": 2}},
}
THOROUGH = ("stages, replicated", "context")


@on_ranks(4)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.thorough if each in THOROUGH else ()) for each in RANKS]
)
def test_ranks_train_the_weights_of_one_process(name) -> None:
    data = {"batch_size": 8, "sequence_length": 8}
    result = verify(llama(**RANKS[name], data=data, memory={"homes": HOMES}), tolerance=1e-10)
    assert result.passed, (result.first, result.largest)


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_homes_are_groups_whose_shards_are_on_the_host(axis, monkeypatch) -> None:
    seen, shard = {}, hp_fsdp.fully_shard

    def noted(module, **given):
        seen[module] = given["offload_policy"]
        return shard(module, **given)

    monkeypatch.setattr(hp_fsdp, "fully_shard", noted)
    homes = {"model.layers.[01]": "host", "model.embed_tokens": "host"}
    plan = llama(mesh={axis: 2}, memory={"homes": homes}, fsdp={} if axis == "tp" else {"groups": ["*.*.*.mlp"]})
    model = apply(build_model(plan, device=device_type()), plan)
    modules = {name: seen[module] for name, module in model.named_modules() if module in seen}
    on_host = {name for name, policy in modules.items() if policy is not None}
    inner = set() if axis == "tp" else {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert on_host == {"model.layers.0", "model.layers.1", "model.embed_tokens"} | inner
    assert len(modules) == {"tp": 8, "dp_shard": 10}[axis]
    assert all(modules[name].link is SwapManager() for name in on_host)
    tokens = torch.arange(16, device=device_type()).view(2, 8)
    with SwapManager().record() as log:
        model(input_ids=tokens, labels=tokens).loss.backward()
    loads = [name for what, name in log if what == "load"]
    # Where no axis shards and the host is the device, what is at home is there.
    assert bool(loads) is (axis == "dp_shard" or device_type() != "cpu")


def test_bytes_of_the_device_and_of_the_host() -> None:
    plan, placed = llama(), llama(memory={"homes": HOMES, "cache": "20 KiB"})
    outline = models().outline(build_model(plan, device="meta"))
    model = build_model(plan, device="meta")
    layers = sum(each.numel() for name, each in model.named_parameters() if ".layers." in name)
    on_host = host_bytes(placed, outline)
    assert on_host == training_bytes(plan, outline) * layers // outline.elements
    assert training_bytes(placed, outline) == training_bytes(plan, outline) - on_host + 20 * 1024
    assert host_bytes(plan, outline) == 0
    ranks = {"mesh": {"dp_shard": 2, "tp": 2}, "run": {"accumulate": 2}}
    plan, placed = llama(**ranks), llama(**ranks, memory={"homes": {"*": "host"}})
    assert host_bytes(placed, outline) == (training_bytes(plan, outline) - 4 * outline.trained // 2), "none waits"
    plan, placed = (llama(mesh={"tp": 2}, memory={"homes": each}) for each in ({}, HOMES))
    visiting = 2 * 4 * layers // 6 // 2
    assert training_bytes(placed, outline) == training_bytes(plan, outline) - host_bytes(placed, outline) + visiting


def test_plans_with_homes(tmp_path) -> None:
    plan = llama(memory={"homes": HOMES, "cache": "1MiB"})
    assert plan.memory.homes == HOMES and lint(plan) == ()
    (path := tmp_path / "plan.toml").write_text(plan.to_toml())
    assert ParallelPlan.from_toml(path) == plan


REFUSED = {
    "nothing": ({"homes": {"model.layer.*": "host"}}, {}, r"'model.layer.\*' matches no module"),
    "list": ({"homes": {"model.layers": "host"}}, {}, "model.layers"),
    "unknown": ({"homes": {"model.layers.*": "disk"}}, {}, "got 'disk'; the one home is 'host'"),
    "neighbour": ({"homes": {"model.layers.*": "neighbour"}}, {}, "whose memory is as full as this rank's"),
    "inside": (
        {"homes": {"model.layers.*": "host", "model.layers.*.mlp": "host"}},
        {},
        r"'model.layers.\*.mlp' matches model.layers.0.mlp, and 'model.layers.\*' matches model.layers.0",
    ),
    "cache": ({"homes": HOMES, "cache": "1KiB"}, {}, "got 1KiB, and the parameters of model.layers.0 take"),
    "size": ({"homes": HOMES, "cache": "1 gig"}, {}, "got '1 gig', expected a number and a unit"),
    "alone": ({"cache": "1GiB"}, {}, "which nothing uses without homes"),
    "budget": ({"homes": HOMES, "budget": "1KiB"}, {}, "got 1KiB, and weights, gradients and optimizer states take"),
    "cache of ranks": (
        {"homes": HOMES, "cache": "1GiB"},
        {"mesh": {"tp": 2}},
        "got homes with a cache, which",
    ),
    "offload": ({"homes": HOMES}, {"fsdp": {"offload": True}}, "got homes with fsdp.offload"),
    "states": ({"homes": HOMES}, {"optimizer": {"swap_slices": 4}}, "got homes with swap_slices"),
    "compile": ({"homes": HOMES}, {"compile": {"blocks": ["model.layers.*"]}}, "got homes with blocks to compile"),
    "dtype": ({"homes": HOMES}, {"fsdp": {"param_dtype": "bfloat16"}}, "got homes with param_dtype"),
    "deterministic": ({"homes": HOMES}, {"run": {"deterministic": True}}, "got homes with deterministic"),
}


def test_who_shares_a_parameter_is_at_home_too() -> None:
    tied = {"model": {"config": "LlamaConfig", "overrides": {**SMALL, "tie_word_embeddings": True}}}
    embed, both = ({"homes": dict.fromkeys(names, "host")} for names in (["*.embed_tokens"], ["*.*_tokens", "lm_head"]))
    (found,) = lint(llama(**tied, memory=embed))
    assert "lm_head.weight as well; give both a home" in str(found)
    assert lint(llama(**tied, memory=both)) == () == lint(llama(memory=embed, mesh={"tp": 2}))
    for memory in (embed, both):
        (found,) = lint(llama(**tied, memory=memory, mesh={"tp": 2}))
        assert found.key.startswith('memory.homes."') and "tie_word_embeddings = false" in found.fix
    assert lint(llama(**tied, memory=both, mesh={"pp": 2})) == ()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name) -> None:
    memory, sections, match = REFUSED[name]
    found = [each for each in lint(llama(memory=memory, **sections)) if each.key.startswith("memory.")]
    assert len(found) == 1, found
    with pytest.raises(PlanError, match=match):
        raise PlanError(found)
