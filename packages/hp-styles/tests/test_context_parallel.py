"""Attention over a cut sequence against one process in float64: losses and all gradients."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_models import DIM, LENGTH, SIZE, Attention, Model, context_mesh, loss_of, random_batch, sum_over_ranks
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_styles import (
    AsyncContextParallel,
    ColwiseParallel,
    ContextParallel,
    RowwiseParallel,
    context_parallel_shard,
    context_parallel_unshard,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def _equals_one_process(model: Model, style: ContextParallel, *, recompute: str = "") -> None:
    mesh, balance = context_mesh(), style.settings.load_balance
    reference, batch = copy.deepcopy(model), random_batch()
    parallelize_module(model, mesh, {"layers.*": style})
    expected = reference(batch["ids"], batch["places"])
    want = loss_of(expected, batch["targets"])
    want.backward()
    part = context_parallel_shard(batch, mesh, load_balance=balance)
    model.recompute = recompute
    logits = model(part["ids"], part["places"])
    loss = loss_of(logits, part["targets"])
    loss.backward()
    total = loss.detach().clone()
    sum_over_ranks(total)
    torch.testing.assert_close(total, want.detach(), rtol=1e-12, atol=1e-12)
    whole = context_parallel_unshard(logits, mesh, load_balance=balance)
    torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-11)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        sum_over_ranks(p.grad)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(part["ids"], part["places"]), logits.detach())


@pytest.mark.smoke
@on_ranks(2, 4)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
@pytest.mark.parametrize("degree", [None, 1, 2], ids=["ulysses", "ring", "two"])
def test_all_gradients_are_those_of_one_process(degree: int | None, load_balance: bool, causal: bool) -> None:
    for kv_heads in (4, 2, 1):
        _equals_one_process(Model(kv_heads, causal), ContextParallel(ulysses_degree=degree, load_balance=load_balance))


@on_ranks(4)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
@pytest.mark.parametrize("degrees", [(2, 2), (2, 1), (1, 2), (1, 1)], ids=["2x2x1", "2x1x2", "1x2x2", "1x1x4"])
def test_heads_inner_and_outer_rings(degrees: tuple[int, int], load_balance: bool, causal: bool) -> None:
    ulysses, inner = degrees
    style = ContextParallel(ulysses_degree=ulysses, inner_ring_degree=inner, load_balance=load_balance)
    _equals_one_process(Model(2, causal), style)


@on_ranks(2)
@pytest.mark.parametrize("degree", [None, 1])
def test_a_call_leaves_nothing_to_the_collector(degree: int | None) -> None:
    mesh, model = context_mesh(), Model(4, True)
    parallelize_module(model, mesh, {"layers.*": ContextParallel(ulysses_degree=degree)})
    part = context_parallel_shard(random_batch(), mesh)
    kinds = {"_Frame", "AttentionAgreement", "Call"}

    def alive() -> int:
        return sum(type(each).__name__ in kinds for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()  # of earlier work of this process
        loss_of(model(part["ids"], part["places"]), part["targets"]).backward()
        assert alive() <= before
    finally:
        gc.enable()


@on_ranks(1, 3)
def test_one_rank_and_three() -> None:
    if dist.get_world_size() == 1:
        _equals_one_process(Model(), ContextParallel(load_balance=True))
        _equals_one_process(Model(), AsyncContextParallel(v_proj="v", head_size=SIZE))
        return
    mesh, x = context_mesh(), torch.randn(1, 12, DIM, dtype=torch.float64, device=device_type())
    module = Attention(2, True)
    want = module(x)
    parallelize_module(module, mesh, ContextParallel(ulysses_degree=1, load_balance=True))
    got = module(context_parallel_shard(x, mesh, load_balance=True))
    torch.testing.assert_close(context_parallel_unshard(got, mesh, load_balance=True), want)


@on_ranks(2, 4)
@pytest.mark.parametrize("degree", [None, 1, 2], ids=["ulysses", "ring", "two"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_recomputed_layers(how: str, degree: int | None) -> None:
    _equals_one_process(Model(2), ContextParallel(ulysses_degree=degree, load_balance=True), recompute=how)
    if degree != 1:
        style = AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE, ulysses_degree=degree)
        _equals_one_process(Model(2), style, recompute=how)


@on_ranks(4, thorough=(2,))
@pytest.mark.parametrize("degree", [None, 2], ids=["ulysses", "two"])
@pytest.mark.parametrize(
    "load_balance", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["consecutive", "balanced"]
)
def test_projections_that_are_sent_at_once(degree: int | None, load_balance: bool) -> None:
    for names in ("qkv", "kv", "v"):
        style = AsyncContextParallel(
            **{f"{name}_proj": name for name in names},  # type: ignore[arg-type]
            head_size=SIZE,
            ulysses_degree=degree,
            load_balance=load_balance,
        )
        for kv_heads in (4, 2, 1):
            _equals_one_process(Model(kv_heads), style)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    mesh = context_mesh()
    module = Attention(2, True).to(dtype)
    x = torch.randn(2, 16, DIM, device=device_type()).to(dtype)
    exact = copy.deepcopy(module).double()
    given = x.double().requires_grad_()
    want = exact(given)
    want.square().sum().backward()
    parallelize_module(module, mesh, ContextParallel(ulysses_degree=1, load_balance=True))
    part = context_parallel_shard(x, mesh, load_balance=True).requires_grad_()
    got = module(part)
    assert got.dtype == dtype
    got.square().sum().backward()
    tolerance = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 0.1}
    cut = context_parallel_shard(want, mesh, load_balance=True)
    torch.testing.assert_close(got.double(), cut, **tolerance)
    grad = context_parallel_shard(given.grad, mesh, load_balance=True)
    torch.testing.assert_close(part.grad.double(), grad, **tolerance)  # type: ignore[union-attr]


# ---- q, k and v as inputs ----
class Core(nn.Module):
    """Attention by hand, with a bias for each distance: something that torch's function is not called for."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        weights = torch.softmax(q @ k.mT + bias, -1)
        return (weights @ v).transpose(1, 2).flatten(2), None


class Torchs(nn.Module):
    def forward(self, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)


@on_ranks(2, 4)
@pytest.mark.parametrize("load_balance", [False, True], ids=["consecutive", "balanced"])
def test_a_module_that_takes_q_k_v_may_compute_what_it_likes(load_balance: bool) -> None:
    mesh = context_mesh()
    whole = [torch.randn(2, 8, n, 3, dtype=torch.float64, device=device_type()) for n in (4, 2, 2)]
    bias = torch.randn(8, 8, dtype=torch.float64, device=device_type())
    leaves = [x.clone().requires_grad_() for x in whole]
    want, _ = Core()(*leaves, bias)
    want.square().sum().backward()
    style = ContextParallel(qkv_indices=(0, 1, 2), load_balance=load_balance)
    module = parallelize_module(Core(), mesh, style)
    parts = [context_parallel_shard(x, mesh, load_balance=load_balance).requires_grad_() for x in whole]
    got, nothing = module(*parts, bias)
    got.square().sum().backward()
    assert nothing is None
    torch.testing.assert_close(context_parallel_unshard(got, mesh, load_balance=load_balance), want)
    for part, leaf in zip(parts, leaves, strict=True):
        grad = context_parallel_unshard(part.grad, mesh, load_balance=load_balance)
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-11, atol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_names_of_inputs_and_a_ring_inside(degree: int) -> None:
    mesh = context_mesh()
    whole = [torch.randn(2, 4, 8, 3, dtype=torch.float64, device=device_type()) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in whole]
    want = Torchs()(query=leaves[0], key=leaves[1], value=leaves[2])
    want.square().sum().backward()
    names = ("query", "key", "value")
    style = ContextParallel(
        qkv_kwarg_names=names, seq_dim=2, head_dim=1, ulysses_degree=degree, load_balance=True, use_local_output=True
    )
    module = parallelize_module(Torchs(), mesh, style)
    parts = [context_parallel_shard(x, mesh, seq_dim=2, load_balance=True) for x in whole]
    given = [DTensor.from_local(x, mesh, [Shard(2)]).requires_grad_() for x in parts]
    got = module(**dict(zip(names, given, strict=True)))
    assert type(got) is torch.Tensor
    got.square().sum().backward()
    torch.testing.assert_close(got, context_parallel_shard(want, mesh, seq_dim=2, load_balance=True))
    for x, leaf in zip(given, leaves, strict=True):
        grad = context_parallel_shard(leaf.grad, mesh, seq_dim=2, load_balance=True)
        torch.testing.assert_close(x.grad.to_local(), grad, rtol=1e-11, atol=1e-12)  # type: ignore[union-attr]


# ---- together with DTensors ----
@on_ranks(2, 4)
@pytest.mark.parametrize("degree", [None, 1], ids=["ulysses", "ring"])
def test_replicated_parameters_get_their_whole_gradient(degree: int | None) -> None:
    mesh = context_mesh()
    model = Model(2)
    reference, batch = copy.deepcopy(model), random_batch()
    loss_of(reference(batch["ids"], batch["places"]), batch["targets"]).backward()
    plan = {name: "replicate" for name, child in model.named_modules() if list(child.parameters(recurse=False))}
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"layers.*": ContextParallel(ulysses_degree=degree, load_balance=True)})
    part = context_parallel_shard(batch, mesh, load_balance=True)
    given = {name: DTensor.from_local(x, mesh, [Shard(1)]) for name, x in part.items()}
    logits = model(given["ids"], given["places"])
    assert logits.placements == (Shard(1),)
    with count_collectives() as counts:
        loss_of(logits, given["targets"]).backward()
    assert counts["all_reduce"] == 1, "one sum for all gradients"
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(4)
@pytest.mark.parametrize("local", [True, False], ids=["plain", "DTensors"])
@pytest.mark.parametrize("style", ["ulysses", "ring", "async"])
def test_heads_over_one_axis_and_the_sequence_over_the_other(style: str, local: bool) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("cp", "tp"))
    module = Attention(2, True)
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64, device=device_type())
    reference, leaf = copy.deepcopy(module), x.clone().requires_grad_()
    want = reference(leaf)
    want.square().sum().backward()
    plan = {
        "[qkv]": ColwiseParallel(use_local_output=local),
        "o": RowwiseParallel(use_local_output=local, output_layouts=R),
    }
    parallelize_module(module, mesh["tp"], plan)
    context = {
        "ulysses": ContextParallel(load_balance=True),
        "ring": ContextParallel(ulysses_degree=1, load_balance=True),
        "async": AsyncContextParallel(q_proj="q", k_proj="k", v_proj="v", head_size=SIZE, load_balance=True),
    }[style]
    parallelize_module(module, mesh["cp"], context)
    part = context_parallel_shard(x, mesh["cp"], load_balance=True)
    given = part.requires_grad_() if local else distribute_tensor(part, mesh["tp"], [R]).requires_grad_()
    got = module(given)
    loss = got.square().sum()
    loss.backward()
    got = got if local else got.full_tensor()
    grad = given.grad if local else given.grad.full_tensor()
    torch.testing.assert_close(context_parallel_unshard(got, mesh["cp"], load_balance=True), want)
    torch.testing.assert_close(context_parallel_unshard(grad, mesh["cp"], load_balance=True), leaf.grad)
    for (name, p), q in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        mine = p.grad.full_tensor()  # type: ignore[union-attr]
        sum_over_ranks(mine, mesh["cp"].get_group())
        torch.testing.assert_close(mine, q[1].grad, msg=lambda m, name=name: f"{name}: {m}")
