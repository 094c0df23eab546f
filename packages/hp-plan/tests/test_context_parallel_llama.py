"""A transformers Llama whose sequence is cut over a mesh axis: its loss and all gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hp_dtensor import DTensor, Shard, implicit_replication, init_device_mesh
from hp_fsdp import fully_shard
from hp_platform import get_platform
from hp_styles import AsyncContextParallel, ContextParallel, context_parallel_shard, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's
LENGTH, VOCABULARY = 16, 19


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(torch.float64).to(device_type()).train()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), device=device_type())
    places = torch.arange(LENGTH, device=device_type()).expand(2, -1)
    return {"input_ids": ids[:, :-1], "position_ids": places, "targets": ids[:, 1:]}


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Labels are shifted already, and with a mask of ones transformers asks for a causal mask by name."""
    ids = batch["input_ids"]
    out = model(input_ids=ids, position_ids=batch["position_ids"], attention_mask=torch.ones_like(ids), use_cache=False)
    return F.cross_entropy(out.logits.flatten(0, 1), batch["targets"].flatten())


STYLES = {
    "ulysses": ContextParallel(load_balance=True),
    "ring": ContextParallel(ulysses_degree=1, load_balance=True),
    "ring of pieces": ContextParallel(ulysses_degree=1),
    "async": AsyncContextParallel(v_proj="v_proj", head_size=4, load_balance=True),
}


@on_ranks(2)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_with_fully_shard(style: str, recompute: bool) -> None:
    mesh = init_device_mesh(device_type(), (1, dist.get_world_size()), ("dp", "cp"))
    context = STYLES[style]
    balance = context.settings.load_balance
    model, batch = _llama(), _batch()
    reference = copy.deepcopy(model)
    want = _loss(reference, batch)
    want.backward()
    parallelize_module(model, mesh["cp"], {"model.layers.*.self_attn": context})
    if recompute:
        # Renamed in the course of transformers 5.
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    for layer in model.model.layers:
        fully_shard(layer, mesh["dp", "cp"]._flatten("dp_cp"))
    fully_shard(model, mesh["dp", "cp"]._flatten("dp_cp"))
    got = _loss(model, context_parallel_shard(batch, mesh["cp"], load_balance=balance))
    got.backward()
    total = got.detach().clone()
    get_platform().collectives.all_reduce(total, group=mesh["cp"].get_group())
    torch.testing.assert_close(total / mesh["cp"].size(), want.detach(), rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor()
        torch.testing.assert_close(grad, q.grad, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(2)
@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_with_replicated_parameters(style: str) -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), ("cp",))
    model, batch = _llama(), _batch()
    reference = copy.deepcopy(model)
    want = _loss(reference, batch)
    want.backward()
    plan = {name: "replicate" for name, child in model.named_modules() if list(child.parameters(recurse=False))}
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"model.layers.*.self_attn": STYLES[style]})
    part = context_parallel_shard(batch, mesh, load_balance=True)
    with implicit_replication():
        got = _loss(model, {name: DTensor.from_local(x, mesh, [Shard(1)]) for name, x in part.items()})
        got.backward()
    torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor()
        torch.testing.assert_close(grad, q.grad, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
