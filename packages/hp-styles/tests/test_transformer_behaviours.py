"""Whole models under plans: a transformer with tied weights, training and inference, equal to the single device's."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hp_platform import count_collectives, manual_seed
from hp_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()
VOCABULARY, LENGTH, DIM, HEADS = 12, 8, 8, 4


def _options() -> dict[str, Any]:
    return {"dtype": torch.float64, "device": device_type()}


class Attention(nn.Module):
    """Causal attention over as many heads as the projections give it."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False, **_options()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)]
        return self.wo(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 4 * DIM, **_options()), nn.Linear(4 * DIM, DIM, **_options())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(DIM, **_options()), nn.LayerNorm(DIM, **_options())
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM, **_options()), nn.Embedding(LENGTH, DIM, **_options())
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM, **_options())
        self.output = nn.Linear(DIM, VOCABULARY, bias=False, **_options())
        if tied:
            self.output.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def _plan(sequence: bool) -> dict[str, Any]:
    stream = Shard(1) if sequence else R
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=R, output_layouts=stream),
        "places": RowwiseParallel(input_layouts=R, output_layouts=Shard(0) if sequence else R),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
        "layers.*.feed_forward.w1": ColwiseParallel(input_layouts=stream),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=R),
    }
    if sequence:
        plan["norm"] = plan["layers.*.*_norm"] = SequenceParallel()
        plan["layers.*.attention"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(R,))
    return plan


def _same(parameters: Iterable[tuple[str, torch.Tensor]], references: Iterable[torch.Tensor], grads: bool) -> None:
    for (name, mine), theirs in zip(parameters, references, strict=True):
        a, b = (mine.grad, theirs.grad) if grads else (mine, theirs)
        if b is None:
            assert a is None, name
            continue
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        torch.testing.assert_close(whole, b, rtol=1e-9, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def _ids(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), device=device_type())


@pytest.mark.smoke
@on_ranks(2, 4)
@pytest.mark.parametrize("sequence", [True, False])
def test_training_a_transformer_with_tied_weights(sequence: bool) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))
    model = Transformer()
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh, _plan(sequence))
    assert model.output.weight is model.tokens.weight and model.tokens.weight.placements == (Shard(0),)
    mine, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain))
    for _ in range(2):
        ids, targets = _ids(), _ids()
        with count_collectives() as forward:
            got = model(ids)
        assert type(got) is torch.Tensor and got.shape == (3, LENGTH, VOCABULARY)
        torch.testing.assert_close(got, plain(ids))
        for logits in (got, plain(ids)):
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        # the two embeddings, then attention and feed-forward of two layers, then the head
        if sequence:
            assert dict(forward) == {"reduce_scatter": 6, "all_gather": 6 + 1}, "1 compares lengths"
        else:
            assert dict(forward) == {"all_reduce": 6, "all_gather": 1}
        _same(model.named_parameters(), plain.parameters(), grads=True)
        with implicit_replication():
            mine.step()
        theirs.step()
        _same(model.named_parameters(), plain.parameters(), grads=False)
        mine.zero_grad()
        theirs.zero_grad()


TRAINED = [
    ("output.weight", "norm.weight", "norm.bias"),
    ("tokens.weight", "output.weight"),
    ("tokens.weight", "layers.1.ffn_norm.weight", "layers.1.ffn_norm.bias", "norm.bias"),
    ("layers.0.attention.wv.weight", "layers.0.feed_forward.w1.bias", "layers.1.feed_forward.w2.weight"),
]


@on_ranks(2)
@pytest.mark.parametrize("sequence", [True, False])
def test_training_some_parameters(sequence: bool) -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    for trained in TRAINED:
        model = Transformer(tied=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        plain, ids = copy.deepcopy(model), _ids()
        parallelize_module(model, mesh, _plan(sequence))
        assert [n for n, p in model.named_parameters() if p.requires_grad] == [
            n for n, p in plain.named_parameters() if p.requires_grad
        ]
        got, want = model(ids), plain(ids)
        with count_collectives() as counted:
            got.square().sum().backward()
        want.square().sum().backward()
        _same(model.named_parameters(), plain.parameters(), grads=True)
        if trained[0] == "output.weight":  # nothing below the last norm has a gradient
            assert sum(counted.values()) <= 2


@on_ranks(2)
def test_the_loss_of_a_head_whose_outputs_stay_sharded() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    model, targets, ids = Transformer(), _ids(), _ids()
    plain = copy.deepcopy(model)
    plan = _plan(True) | {"output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
    parallelize_module(model, mesh, plan)
    want = F.cross_entropy(plain(ids).flatten(0, 1), targets.flatten())
    want.backward()
    with loss_parallel():
        got = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        got.backward()
    torch.testing.assert_close(got.full_tensor(), want)
    _same(model.named_parameters(), plain.parameters(), grads=True)


@on_ranks(2)
def test_inference() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    for sequence in (True, False):
        model, ids = Transformer(), _ids()
        plain = copy.deepcopy(model)
        parallelize_module(model, mesh, _plan(sequence))
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(model(ids), plain(ids))
    with torch.inference_mode():  # and made in it
        feed, x = FeedForward(), torch.randn(3, DIM, **_options())
        want = feed(x)
        plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel()}
        torch.testing.assert_close(parallelize_module(feed, mesh, plan)(x), want)


class Packed(nn.Module):
    """Attention with one projection for queries, keys and values, head by head, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, **_options()), nn.Linear(DIM, DIM, **_options())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, DIM // HEADS)).transpose(1, 3).unbind(1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@on_ranks(2, 4)
@pytest.mark.parametrize("local", [True, False])
def test_attention_with_one_projection(local: bool) -> None:
    mesh = init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))
    module, x = Packed(), torch.randn(2, 5, DIM, **_options())
    plain, x0, x1 = copy.deepcopy(module), x.clone().requires_grad_(), x.clone().requires_grad_()
    plan = {"qkv": ColwiseParallel(use_local_output=local), "out": RowwiseParallel(use_local_output=local)}
    parallelize_module(module, mesh, plan)
    want, got = plain(x0), module(x1)
    torch.testing.assert_close(got if local else got.full_tensor(), want)
    want.pow(3).sum().backward()
    got.pow(3).sum().backward()
    torch.testing.assert_close(x1.grad, x0.grad)
    _same(module.named_parameters(), plain.parameters(), grads=True)


@on_ranks(2)
def test_weights_tied_after_they_were_distributed() -> None:
    mesh = init_device_mesh(device_type(), (2,), ("tp",))
    model = nn.Sequential(nn.Embedding(16, 8, **_options()), nn.Linear(8, 16, **_options()))
    plain, ids = copy.deepcopy(model), torch.randint(0, 16, (5,), device=device_type())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for tie in (False, True):
        if tie:
            model[1].weight, plain[1].weight = model[0].weight, plain[0].weight
        model.zero_grad()
        plain.zero_grad()
        torch.testing.assert_close(model(ids), plain(ids))
        model(ids).square().sum().backward()
        plain(ids).square().sum().backward()
        assert (model[0].weight.grad is model[1].weight.grad) is tie
        _same(model.named_parameters(), plain.parameters(), grads=True)


@on_ranks(2, 3)
def test_sizes_that_the_ranks_do_not_divide() -> None:
    mesh = init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))
    model = nn.Sequential(
        nn.Embedding(11, 7, **_options()), nn.Linear(7, 13, **_options()), nn.Linear(13, 5, **_options())
    )
    plain, ids = copy.deepcopy(model), torch.randint(0, 11, (5, 7), device=device_type())
    stay = {"use_local_output": False}
    plan = {
        "0": ColwiseParallel(output_layouts=Shard(1), **stay),
        "1": ColwiseParallel(**stay),
        "2": RowwiseParallel(output_layouts=Shard(1), **stay),
    }
    parallelize_module(model, mesh, plan)
    want, got = plain(ids), model(ids)
    assert got.placements == (Shard(1),)
    torch.testing.assert_close(got.full_tensor(), want)
    got.square().sum().backward()
    want.square().sum().backward()
    _same(model.named_parameters(), plain.parameters(), grads=True)


@on_ranks(4)
def test_models_built_without_memory() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), ("dp", "tp"))
    manual_seed(5)
    plain = FeedForward()
    with torch.device("meta"):
        model = nn.ModuleDict({"w1": nn.Linear(DIM, 4 * DIM), "w2": nn.Linear(4 * DIM, DIM)}).double()
    parallelize_module(
        model, mesh["tp"], {"w1": ColwiseParallel(output_layouts=R), "w2": ColwiseParallel(output_layouts=R)}
    )
    assert all(p.is_meta and p.placements == (Shard(0),) for p in model.parameters())
    model.to_empty(device=device_type())
    manual_seed(5)
    for child in model.values():
        child.reset_parameters()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor) and mine.device_mesh == mesh["tp"]
        assert torch.equal(mine.full_tensor(), theirs), "on every line of the data axis, too"
    x = torch.randn(2, DIM, **_options())
    torch.testing.assert_close(model["w1"](x), plain.w1(x))


@on_ranks(4)
def test_a_plan_on_one_axis_of_a_mesh_in_any_order() -> None:
    from hp_dtensor import DeviceMesh

    mesh = DeviceMesh(device_type(), [[3, 1], [0, 2]], ("dp", "tp"))
    model, ids = Transformer(), _ids()
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], _plan(True))
    got, want = model(ids), plain(ids)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    _same(model.named_parameters(), plain.parameters(), grads=True)
    mine = distribute_tensor(ids, mesh["tp"], [R])
    assert mine.device_mesh.get_local_rank() == mesh.get_coordinate()[1]
