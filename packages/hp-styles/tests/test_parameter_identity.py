"""Styles keep the parameters: an optimizer, ties, gradients and hooks of before go on as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import DTensor, Replicate, Shard, init_device_mesh
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_type()}
        self.embed = nn.Embedding(6, 4, **options)
        self.up, self.down = nn.Linear(4, 8, **options), nn.Linear(8, 4, **options)
        self.head = nn.Linear(4, 6, bias=False, **options)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def _pair() -> tuple[Model, Model]:
    torch.manual_seed(0)
    plain = Model()
    return plain, copy.deepcopy(plain)


def _ids() -> torch.Tensor:
    return torch.tensor([[0, 5, 2], [1, 1, 4]], device=device_type())


def _full(x: Any) -> torch.Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(ids).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _same(model: nn.Module, plain: nn.Module) -> None:
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_full(got), _full(want), msg=lambda m, name=name: f"{name}: {m}")


PLAN = {
    "embed": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=R),
}


@on_ranks(2)
def test_an_optimizer_and_hooks_of_before() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    (plain, model), seen = _pair(), ([], [])
    optimizers = []
    for each, to in zip((plain, model), seen, strict=True):
        optimizers.append(torch.optim.Adam(each.parameters(), lr=0.1))
        each.embed.weight.register_hook(lambda g, to=to: to.append(g) or g * 2)
        each(_ids()).pow(2).mean().backward()
    parallelize_module(model, mesh, PLAN)
    assert model.head.weight is model.embed.weight and isinstance(model.embed.weight.grad, DTensor)
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            _step(each, optimizer, _ids())
    _same(model, plain)
    assert len(seen[0]) == len(seen[1]) == 3
    for got, want in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(_full(got), want)


@pytest.mark.parametrize("styled", ["embed", "head"])
@on_ranks(2)
def test_one_of_two_tied_modules_without_a_style_is_refused_where_it_computes(styled: str) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    _, model = _pair()
    parallelize_module(model.get_submodule(styled), mesh, PLAN[styled])
    assert model.head.weight is model.embed.weight
    with pytest.raises(
        ValueError, match="meets a DTensor .* Where two modules share it as their weight, give both a style"
    ):
        model(_ids())


@on_ranks(2)
def test_tied_modules_styled_in_calls_of_their_own() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    plain, model = _pair()
    RowwiseParallel().apply(model.embed, mesh)
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=R))
    assert model.head.weight is model.embed.weight
    for each in (plain, model):
        _step(each, torch.optim.SGD(each.parameters(), lr=0.5), _ids())
    _same(model, plain)
    _, other = _pair()
    parallelize_module(other.embed, mesh, ColwiseParallel())
    with pytest.raises(ValueError, match=r"this style wants \(Shard\(0\),\): .* two modules that share the parameter"):
        parallelize_module(other.head, mesh, ColwiseParallel())


@on_ranks(2)
def test_two_keys_for_parameters_that_are_tied() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    _, model = _pair()
    parallelize_module(model, mesh, {"embed.weight": RowwiseParallel(), "head.weight": RowwiseParallel()})
    assert model.head.weight is model.embed.weight and model.head.weight.placements == (Shard(1),)
    _, model = _pair()
    with pytest.raises(ValueError, match="two keys match one parameter, or two tied ones"):
        parallelize_module(model, mesh, {"embed.weight": RowwiseParallel(), "head.weight": ColwiseParallel()})


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@on_ranks(2)
def test_an_optimizer_that_has_stepped_before(kind: Any, foreach: bool) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    _, model = _pair()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, foreach=foreach, **options)
    _step(model, optimizer, _ids())
    parallelize_module(model, mesh, PLAN)
    with pytest.raises(ValueError, match="plain tensor"):
        _step(model, optimizer, _ids())
