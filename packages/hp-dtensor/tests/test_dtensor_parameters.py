"""Modules, parameters and optimizers of DTensors."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hp_dtensor.torch.dtensor import local_view
from hp_dtensor.torch.ops.dispatching import dispatch
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

R, P = Replicate(), Partial()


def _mesh(ranks: int = 2) -> DeviceMesh:
    return init_device_mesh(device_type(), (ranks,), ("x",))


def _arange(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device_type()).reshape(shape)


def _dt(*shape: int, placement: Any = None, ranks: int = 2) -> DTensor:
    return distribute_tensor(_arange(*shape), _mesh(ranks), [placement or Shard(0)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(3, 5, dtype=torch.float64), nn.LayerNorm(5, dtype=torch.float64)
        self.register_buffer("scale", torch.full((5,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x)) * self.scale


def _rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters()):
            setattr(module, key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))


@pytest.mark.smoke
@on_ranks(2, 3)
def test_modules(ranks: int) -> None:
    mesh = _mesh(ranks)
    torch.manual_seed(0)
    plain = Net().to(device_type())
    net = copy.deepcopy(plain)
    made = distribute_module(
        net,
        mesh,
        _rows,
        lambda mod, inputs, mesh: (distribute_tensor(inputs[0], mesh, [Shard(0)]),),
        lambda mod, output, mesh: output.full_tensor(),
    )
    assert made is net and net.up.weight.placements == (Shard(0),) and net.norm.weight.placements == (R,)
    assert net.scale.placements == (R,) and all(isinstance(p, nn.Parameter) for p in net.parameters())
    x = _arange(4, 3)
    assert torch.allclose(net(x), plain(x), rtol=0, atol=1e-14)
    net(x).sum().backward()
    plain(x).sum().backward()
    for mine, theirs in zip(net.parameters(), plain.parameters()):
        assert torch.allclose(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=1e-12)
    state = net.state_dict()
    assert {k: v.full_tensor().equal(plain.state_dict()[k]) for k, v in state.items()} == dict.fromkeys(state, True)
    other = distribute_module(Net().to(device_type()), mesh, _rows)
    other.load_state_dict(state)
    assert all(torch.equal(local_view(a), local_view(b)) for a, b in zip(other.parameters(), net.parameters()))
    with pytest.raises(RuntimeError, match="up.weight"):
        other.load_state_dict(plain.state_dict())
    for again in (net, copy.deepcopy(net)):
        with pytest.raises(RuntimeError, match="distribute_module: this Net is distributed already"):
            distribute_module(again, mesh)
    half = copy.deepcopy(net).to(torch.float32)
    assert half.up.weight.dtype == torch.float32 and half.up.weight.placements == (Shard(0),)


# ---- parameters ----
@on_ranks(2)
def test_requires_grad_data_and_grad() -> None:
    x = _dt(5, 2)
    assert x.requires_grad_() is x and x.requires_grad and not x.detach().requires_grad
    x.requires_grad = False
    assert not x.requires_grad
    x = nn.Parameter(x)
    other = distribute_tensor(-_arange(5, 2), x.device_mesh, [Shard(0)])
    x.data = other
    assert torch.equal(x.full_tensor(), -_arange(5, 2)) and x.data.placements == (Shard(0),)
    x.data = other.redistribute(placements=[R])
    assert x.placements == (R,) and x.shape == (5, 2)
    with pytest.raises(TypeError, match="data of a DTensor must be a DTensor"):
        x.data = _arange(5, 2)
    x.data = distribute_tensor(_arange(5, 2), x.device_mesh, [R])
    assert torch.equal(x.full_tensor(), _arange(5, 2))
    with pytest.raises(TypeError, match=r"grad of a DTensor must be a DTensor or None, got Tensor of shape \(5, 2\)"):
        x.grad = _arange(5, 2)
    with pytest.raises(
        ValueError, match=r"grad is placed \(Shard\(0\),\) and has shape \(5, 2\), but the tensor needs"
    ):
        x.grad = other
    x.grad = other.redistribute(placements=[R])
    assert x.grad.placements == (R,)
    x.grad = None
    assert x.grad is None


def _steps(build: Any, parameters: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> None:
    optimizer = build(parameters)
    for step in grads:
        for parameter, grad in zip(parameters, step):
            parameter.grad = grad
        optimizer.step()


OPTIMIZERS = {
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}


@pytest.mark.device
@on_ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_what_they_do_on_one_device(name: str, ranks: int) -> None:
    mesh = _mesh(ranks)
    ragged = RaggedShard((0, 1), (9, 1) if ranks == 2 else (9, 0, 1))
    layouts = [Shard(0), Shard(1), R, ragged]
    plain = [nn.Parameter(_arange(5, 2) / 7 + i) for i in range(4)]
    mine = [nn.Parameter(distribute_tensor(p.data, mesh, [s])) for p, s in zip(plain, layouts)]
    grads = [[(_arange(5, 2) - 3 * i) / (2 + step) for i in range(4)] for step in range(3)]
    _steps(OPTIMIZERS[name], plain, grads)
    with count_collectives() as counted:
        sharded = [
            [distribute_tensor(g, mesh, [s], src_data_rank=None) for g, s in zip(step, layouts)] for step in grads
        ]
        _steps(OPTIMIZERS[name], mine, sharded)
    assert not sum(counted.values()), "optimizers run where the parts are"
    for a, b, layout in zip(mine, plain, layouts):
        assert a.placements == (layout,) and torch.allclose(a.full_tensor(), b, rtol=1e-13, atol=1e-13), layout


@on_ranks(2)
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clip_grad_norm(order: float, foreach: bool | None) -> None:
    mesh = _mesh()
    plain = [nn.Parameter(_arange(4, 2)) for _ in range(3)]
    mine = [nn.Parameter(distribute_tensor(_arange(4, 2), mesh, [s])) for s in (Shard(0), Shard(1), R)]
    for i, (a, b) in enumerate(zip(mine, plain)):
        b.grad = _arange(4, 2) * (i + 1) - 5
        a.grad = distribute_tensor(b.grad, mesh, a.placements)
    expected = nn.utils.clip_grad_norm_(plain, 1.5, order, foreach=foreach)
    with count_collectives() as counted:
        norm = nn.utils.clip_grad_norm_(mine, 1.5, order, foreach=foreach)
    assert counted == {"all_reduce": 2 if foreach is False else 1}  # one for all, as torch calls it by default
    assert norm.item() == pytest.approx(expected.item(), rel=1e-14)
    for a, b in zip(mine, plain):
        assert torch.allclose(a.grad.full_tensor(), b.grad, rtol=1e-13, atol=0)
    total = nn.utils.get_total_norm([p.grad for p in mine])
    assert total.item() == pytest.approx(nn.utils.get_total_norm([p.grad for p in plain]).item(), rel=1e-13)


@on_ranks(2)
def test_lists_of_dtensors_and_plain_tensors_are_errors() -> None:
    a = _dt(4)
    with pytest.raises(ValueError, match=r"add: a plain tensor of shape \(4,\) meets a DTensor of shape \(4,\)"):
        torch._foreach_add([a], [_arange(4)])


@on_ranks(2)
def test_nothing_grows():
    mesh = _mesh()
    x = distribute_tensor(_arange(4, 3), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(_arange(3), mesh, [R]).requires_grad_()

    def step(scale):
        ((x * scale + 0.5 * scale) * w).clamp(-scale, scale).sum().backward()
        x.grad = w.grad = None

    for i in range(3):
        step(1.0 + i)
    gc.collect()
    plans, objects = len(dispatch._PLANS), len(gc.get_objects())
    for i in range(200):
        step(0.1 * i + 2)
    gc.collect()
    assert len(dispatch._PLANS) == plans
    assert len(gc.get_objects()) < objects + 100
