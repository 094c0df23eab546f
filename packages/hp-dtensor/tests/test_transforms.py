"""Transforms of torch.func don't ask a tensor's class: DTensors are refused by name, plain tensors are let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn

from hp_dtensor import (
    DTensor,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_value_and_grad,
)
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # of torch's own forward mode
]


def _energy(x: Any) -> Any:
    return (x**3).sum()


def _rows(x: Any) -> Any:
    return x.square()


def _dual(x: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(x, x)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda x: func.grad(_energy)(x),
    "grad_and_value": lambda x: func.grad_and_value(_energy)(x),
    "grad of a dict": lambda x: func.grad(lambda tree: _energy(tree["w"]))({"w": x}),
    "vjp": lambda x: func.vjp(_rows, x),
    "jacrev": lambda x: func.jacrev(_rows)(x),
    "vmap": lambda x: func.vmap(_rows)(x),
    "vmap in chunks": lambda x: func.vmap(_rows, chunk_size=1)(x),
    "vmap of a closure": lambda x: func.vmap(lambda row: row * x)(torch.ones(2, device=device_type())),
    "vmap that returns another": lambda x: func.vmap(lambda row: x)(torch.ones(2, device=device_type())),
    "grad of a closure": lambda x: func.grad(lambda scale: (scale * x).sum())(torch.ones((), device=device_type())),
    "jvp": lambda x: func.jvp(_rows, (x,), (x,)),
    "jacfwd": lambda x: func.jacfwd(_rows)(x),
    "hessian": lambda x: func.hessian(_energy)(x),
    "linearize": lambda x: func.linearize(_rows, x),
    "functionalize": lambda x: func.functionalize(_rows)(x),
    "make_dual": _dual,
}


@on_ranks(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_a_dtensor_is_refused(name: str) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(torch.rand(4, 3, device=device_type()), mesh, [placement])
        with pytest.raises(NotImplementedError, match=r"DTensor of shape .* is not supported: the transform would see"):
            TRANSFORMS[name](x)
        assert torch.equal((x * 2).full_tensor(), x.full_tensor() * 2), "no transform stays active"


@on_ranks(2)
def test_what_to_use_in_their_place() -> None:
    mesh, whole = init_device_mesh(device_type(), (2,)), torch.rand(4, 3, device=device_type())
    x = distribute_tensor(whole, mesh, [Shard(0)])
    first, second = 3 * whole.square(), torch.autograd.functional.hessian(_energy, whole)
    leaf = x.detach().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(_energy(leaf), leaf)[0].full_tensor(), first)
    _, (grad,) = parallelize_value_and_grad(_energy, (0,))(x)
    torch.testing.assert_close(grad.full_tensor(), first)
    torch.testing.assert_close(custom_shard(func.grad(_energy), mesh, [Shard(0)])(x).full_tensor(), first)
    torch.testing.assert_close(torch.autograd.functional.hessian(_energy, x).full_tensor(), second)
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(_rows, x).full_tensor(), jacobian(_rows, whole))


@on_ranks(2)
def test_plain_tensors_are_transformed_as_ever() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = torch.rand(4, 3, device=device_type())
    for name in ("grad", "jacrev", "vmap", "jacfwd", "hessian", "functionalize"):
        assert TRANSFORMS[name](x).shape[:2] == (4, 3)
    local = custom_shard(func.vmap(func.grad(_energy)), mesh, [Shard(0)])
    made = local(distribute_tensor(x, mesh, [Shard(0)]))
    torch.testing.assert_close(made.full_tensor(), 3 * x.square())
    compiled = torch.compile(func.grad(_energy), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), 3 * x.square())


@on_ranks(2)
def test_functional_call() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    model, x = nn.Linear(6, 4, device=device_type()), torch.rand(3, 6, device=device_type())
    weights = {name: distribute_tensor(p.detach(), mesh, [Shard(0)]) for name, p in model.named_parameters()}
    given = distribute_tensor(x, mesh, [Replicate()])
    made = func.functional_call(model, weights, (given,))
    assert isinstance(made, DTensor)
    torch.testing.assert_close(made.full_tensor(), model(x))
    with pytest.raises(NotImplementedError, match="torch.func .grad, vjp, jacrev. of a DTensor"):
        func.grad(lambda weights: func.functional_call(model, weights, (given,)).sum())(weights)
