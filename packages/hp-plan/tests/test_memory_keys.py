"""What a plan says of memory takes effect: activations computed again or on the host, shards on the host."""

from __future__ import annotations

import pytest
import torch

import hp_fsdp
from hp_offload import SwapManager
from hp_plan import ParallelPlan, apply, build_model, build_optimizer, lint, verify
from hp_plan.checks.checks import check_plan
from hp_plan.port import models
from hp_plan.structure.memory import host_bytes, training_bytes
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
SIZES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
SMALL = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
BLOCKS, MLPS = ["model.layers.*"], ["model.layers.*.mlp"]


def llama(**sections) -> ParallelPlan:
    data = {"data": {"batch_size": 4, "sequence_length": 8}}
    return ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": SMALL}, **data, **sections})


def step(plan):
    """The loss and gradients of a step, and the bytes that it saved for backward."""
    model = apply(build_model(plan).to(device_type()), plan)
    tokens = torch.arange(32, device=device_type()).view(4, 8) % 16
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    local = [getattr(each.grad, "to_local", lambda each=each: each.grad)() for each in model.parameters()]
    return [loss.detach(), *local], sum(saved.values())


@on_ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_blocks_that_are_computed_again_save_less_and_have_the_same_bits(axis):
    mesh = {"mesh": {axis: 2}}
    plain, everything = step(llama(**mesh))
    again, less = step(llama(**mesh, memory={"recompute": BLOCKS}))
    assert all(map(torch.equal, plain, again))
    assert less < 0.5 * everything
    part, some = step(llama(**mesh, memory={"recompute": ["model.layers.*.mlp"]}))
    assert all(map(torch.equal, plain, part))
    assert less < some < everything


@on_ranks(2)
def test_blocks_that_wait_on_the_host_have_the_same_bits():
    mesh = {"mesh": {"dp_shard": 2}}
    plain, _ = step(llama(**mesh))
    with SwapManager().record() as log:
        swapped, _ = step(llama(**mesh, memory={"swap": MLPS, "recompute": ["model.layers.*.self_attn"]}))
    assert all(map(torch.equal, plain, swapped))
    assert {what for what, _ in log} >= {"launch_offload", "launch_load"}


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["zbv", pytest.param("1f1b", marks=pytest.mark.thorough)])
def test_stages_compute_again(schedule):
    memory = {"recompute": ["model.layers.*.self_attn"], "swap": ["model.layers.*.mlp"]}
    mesh = {"pp": 2, "tp": 2}
    result = verify(llama(mesh=mesh, pipeline={"schedule": schedule}, memory=memory), tolerance=1e-10)
    assert result.passed, (result.first, result.largest)


@on_ranks(4)
@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"dp_shard": 4}, "fsdp": {"reshard_after_forward": 2}},
        {"mesh": {"dp_shard": 2, "cp": 2}, "fsdp": {"reshard_after_forward": 2}, "memory": {"recompute": BLOCKS}},
        {"mesh": {"dp_shard": 2, "tp": 2}, "fsdp": {"offload": True}, "run": {"grad_clip": 0.1, "accumulate": 2}},
        {"mesh": {"dp_shard": 4}, "fsdp": {"offload": True}, "optimizer": {"name": "muon"}},
    ],
    ids=["resharded to two", "resharded over cp", "on the host", "muon on the host"],
)
def test_options_of_groups_train_the_same_weights(sections):
    result = verify(llama(**sections), tolerance=1e-10)
    assert result.passed, (result.first, result.largest)


@on_ranks(4)
def test_options_of_groups_reach_them(monkeypatch):
    seen, shard = [], hp_fsdp.fully_shard
    monkeypatch.setattr(hp_fsdp, "fully_shard", lambda module, **given: seen.append(given) or shard(module, **given))
    plan = llama(mesh={"dp_shard": 4}, fsdp={"reshard_after_forward": 2, "offload": True})
    apply(build_model(plan), plan)
    assert len(seen) == 5 and all(each["reshard_after_forward"] == 2 for each in seen)
    assert all(isinstance(each["offload_policy"], hp_fsdp.CPUOffloadPolicy) for each in seen)


def test_estimates_know_what_is_on_the_host():
    outline = models().outline(build_model(llama(), device="meta"))
    on_device, offloaded = llama(mesh={"dp_shard": 2}), llama(mesh={"dp_shard": 2}, fsdp={"offload": True})
    assert training_bytes(on_device, outline) == host_bytes(offloaded, outline) > 0
    assert training_bytes(offloaded, outline) == host_bytes(on_device, outline) == 0
    accumulated = llama(mesh={"dp_shard": 2}, run={"accumulate": 2})
    assert training_bytes(accumulated, outline) == training_bytes(on_device, outline) + 4 * outline.elements


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"memory": {"recompute": ["model.layer.*"]}},
            "memory.recompute[0]: 'model.layer.*' matches no module",
        ),
        ({"memory": {"recompute": ["model.layers"]}}, "memory.recompute[0]: 'model.layers' matches model.layers, a"),
        (
            {"memory": {"recompute": BLOCKS, "swap": BLOCKS}},
            "memory.swap[0]: 'model.layers.*' matches model.layers.0",
        ),
        (
            {"memory": {"recompute": ["model.layers.*.mlp"], "swap": BLOCKS}},
            "memory.recompute[0]: model.layers.0.mlp is inside of model.layers.0, which memory.swap[0] names",
        ),
        ({"memory": {"recompute": BLOCKS, "budget": "1GiB"}}, "memory.recompute: got recompute with a budget"),
        (
            {"mesh": {"dp_shard": 4}, "fsdp": {"reshard_after_forward": 3}},
            "fsdp.reshard_after_forward: got 3 ranks, which do not divide the 4 that parameters are sharded over",
        ),
        (
            {"mesh": {"dp_shard": 4, "ep": 2}, "fsdp": {"reshard_after_forward": 2}},
            "fsdp.reshard_after_forward: got 2 with mesh.ep = 2",
        ),
        ({"mesh": {"tp": 2}, "fsdp": {"offload": True}}, "fsdp: offload would have no effect"),
        (
            {"mesh": {"dp_shard": 2}, "fsdp": {"offload": True}, "optimizer": {"swap_slices": 2}},
            "optimizer.swap_slices: got 2, but fsdp.offload has states on the host",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(sections, expected):
    texts = [str(diagnostic) for diagnostic in lint(llama(**sections).to_dict())]
    assert any(text.startswith(expected) for text in texts), texts


def test_a_number_of_ranks_is_at_least_one():
    with pytest.raises(ValueError, match="fsdp.reshard_after_forward: got 0"):
        llama(fsdp={"reshard_after_forward": 0})
    assert not check_plan(llama(mesh={"dp_shard": 2}, fsdp={"reshard_after_forward": False}))


@on_ranks(1)
def test_an_optimizer_steps_on_one_rank_with_recomputed_blocks():
    plan = llama(memory={"recompute": BLOCKS})
    model = apply(build_model(plan).to(device_type()), plan)
    optimizer = build_optimizer(plan, model.named_parameters())
    tokens = torch.arange(32, device=device_type()).view(4, 8) % 16
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
