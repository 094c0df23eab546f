"""Parameters stay the objects that they were while they are distributed: optimizers, ties, gradients and hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import (
    DTensor,
    Layout,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
)
from hp_dtensor.creation.sharding_plan import shard_module
from hp_dtensor.torch.api import distribute_parameter
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
R = Replicate()


def _mesh() -> Any:
    return init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))


class Model(nn.Module):
    """Two Linears and an output that shares the first one's weight."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.up, self.norm = nn.Linear(4, 4, **options), nn.LayerNorm(4, **options)
        self.head = nn.Linear(4, 4, bias=False, **options)
        self.head.weight = self.up.weight

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(torch.tanh(self.up(x))))


def _shard_module(model: nn.Module, mesh: Any) -> None:
    layout = Layout(mesh.shape, mesh.mesh_dim_names)
    shard_module(model, {"parameter": {"up.weight": layout("tp", "None"), "up.bias": layout("tp")}})


def _replace(name: str, module: nn.Module, mesh: Any) -> None:
    """As in torch's documentation: new parameters, registered under the same names."""
    if isinstance(module, nn.Linear):
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                made = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
                module.register_parameter(key, made)


def _distribute_module(model: nn.Module, mesh: Any) -> None:
    distribute_module(model, mesh, _replace)


def _replicate(model: nn.Module, mesh: Any) -> None:
    distribute_module(model, mesh)


@pytest.mark.parametrize("distribute", [_shard_module, _distribute_module, _replicate])
@on_ranks(2)
def test_an_optimizer_of_before_trains_what_is_distributed(distribute: Any) -> None:
    mesh = _mesh()
    torch.manual_seed(0)
    plain = Model(device_type())
    model = copy.deepcopy(plain)
    x = torch.arange(12.0, dtype=torch.float64, device=device_type()).view(3, 4).cos()
    seen: list[list[Any]] = [[], []]
    accumulated: list[list[Any]] = [[], []]
    optimizers = []
    for index, each in enumerate((plain, model)):
        each.head.weight.register_hook(lambda g, to=seen[index]: to.append(g) or g * 2)
        each.norm.weight.register_post_accumulate_grad_hook(lambda p, to=accumulated[index]: to.append(p.grad.clone()))
        optimizers.append(torch.optim.Adam(each.parameters(), lr=0.1))
        each(x).pow(2).sum().backward()  # gradients of before are distributed, too
    distribute(model, mesh)
    assert model.head.weight is model.up.weight
    assert isinstance(model.up.weight, DTensor) and isinstance(model.up.weight.grad, DTensor)
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers):
            value = x if each is plain else distribute_tensor(x, mesh, [R])
            each(value).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), msg=lambda m, n=name: f"{n}: {m}")
    assert len(seen[0]) == len(seen[1]) == len(accumulated[0]) == len(accumulated[1]) == 3
    for got, want in zip(seen[1] + accumulated[1], seen[0] + accumulated[0]):
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want)


@on_ranks(2)
def test_a_parameter_of_partition_fn_that_others_have_stays() -> None:
    mesh, model, mine = _mesh(), nn.Linear(4, 4, device=device_type()), []

    def replace(name: str, module: nn.Module, mesh: Any) -> None:
        mine.append(nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(0)])))
        module.weight = mine[0]

    old = model.bias
    distribute_module(model, mesh, replace)
    assert model.weight is mine[0] and model.bias is old


@on_ranks(2)
def test_partition_fn_materialises_meta_parameters() -> None:
    def materialise(name: str, module: nn.Module, mesh: Any) -> None:
        for key, value in list(module._parameters.items()):
            empty = torch.empty_like(distribute_tensor(value, mesh, [Shard(0)]), device=device_type())
            module.register_parameter(key, nn.Parameter(torch.ones_like(empty)))

    model = distribute_module(nn.Linear(4, 3, device="meta"), _mesh(), materialise)
    for value in model.parameters():
        assert isinstance(value, DTensor) and value.placements == (Shard(0),)
        assert value.device.type == device_type() and bool((value.full_tensor() == 1).all())


@on_ranks(2)
def test_a_hook_sees_the_layout_that_its_parameter_has_by_then() -> None:
    whole = torch.arange(6.0, dtype=torch.float64, device=device_type())
    mesh, model, seen = _mesh(), nn.Module(), []
    model.weight = nn.Parameter(whole.clone())
    distribute_module(model, mesh)
    model.weight.register_hook(lambda g: seen.append(g))
    distribute_parameter(model.weight, mesh, [Shard(0)])
    (model.weight**2).sum().backward()
    assert seen[0].placements == (Shard(0),)
    torch.testing.assert_close(seen[0].full_tensor(), whole * 2)


@on_ranks(2)
def test_an_optimizer_of_before_init_parameters() -> None:
    mesh, seen = _mesh(), []
    with init_empty_weights():
        model = Model()
    weight = model.up.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight.register_hook(lambda g: seen.append(g))
    model.norm.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    _shard_module(model, mesh)
    torch.manual_seed(3)
    init_parameters(model)
    assert model.up.weight is weight and model.head.weight is weight
    torch.manual_seed(3)
    plain = Model(device_type())
    x = torch.ones(2, 4, dtype=torch.float64, device=device_type())
    for each, value in ((plain, x), (model, distribute_tensor(x, mesh, [R]))):
        each(value).pow(3).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    optimizer.step()
    assert len(seen) == 2
    torch.testing.assert_close(
        seen[0].full_tensor() if seen[0].dim() == 2 else seen[1].full_tensor(), plain.up.weight.grad
    )
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), want.detach())
