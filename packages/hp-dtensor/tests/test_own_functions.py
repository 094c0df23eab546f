"""A user's own `torch.autograd.Function`, checkpoints and hooks of saved tensors, on DTensors, against one device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_names import Cubed
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hp_dtensor import (
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

LAYOUTS = (Shard(0), Shard(1), Replicate(), Partial(), RaggedShard((0, 1), (1, 4)))


class Exponential(torch.autograd.Function):
    """Saves its result and a value in between."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        twice = 2 * x
        y = twice.exp()
        ctx.save_for_backward(y, twice, None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        y, twice, nothing = ctx.saved_tensors
        assert nothing is None
        return 2 * y * grad + 0 * twice


class Centred(torch.autograd.Function):
    """Saves nothing; its gradient is reduced over all elements."""

    @staticmethod
    def forward(x: Any, factor: float = 2.0) -> Any:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def vjp(ctx: Any, grad: Any) -> Any:
        return grad * ctx.factor - grad.mean(), None


class Mixed(torch.autograd.Function):
    """Two arguments, two results and one that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        above = x > 0
        ctx.mark_non_differentiable(above)
        return x * y, x.sum(), above

    @staticmethod
    def backward(ctx: Any, grad: Any, of_sum: Any, _: Any) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * y + of_sum, (grad * x).sum()


class Same(torch.autograd.Function):
    """Gives its argument back."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad + grad.sum()


class Doubled(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * 2 - grad.max()


class Narrowed(torch.autograd.Function):
    """Gives what ``made`` makes of its argument, and ``made`` of the gradient as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, made: Callable[[Any], Any], back: Callable[[Any], Any]) -> Any:
        ctx.back = back
        return made(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return ctx.back(grad), None, None


def mixed(x: Any) -> Any:
    y, total, above = Mixed.apply(x.flatten(), (x * x).sum())
    return (y * total * above.double()).reshape(x.shape)


FUNCTIONS = (Cubed.apply, Exponential.apply, Centred.apply, mixed, Same.apply, lambda x: Doubled.apply(x * 1))


def check(compute: Callable[[Any], Any], layouts: Any = LAYOUTS, again: bool = False) -> None:
    """Compares values and gradients, or gradients of gradients, with one device's."""
    mesh = init_device_mesh(device_type(), (2,))
    generator = torch.Generator().manual_seed(0)
    whole, weight = (torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(2))

    def gradient(x: Any, weight: Any) -> tuple[Any, Any]:
        y = compute(x)
        loss = (y * weight).sum() + y.square().sum()
        if again:
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = (first * first * weight).sum() + first.sum()
        loss.backward()
        return y, x.grad

    truth = gradient(whole.clone().requires_grad_(), weight)
    for layout in layouts:
        x = distribute_tensor(whole, mesh, [layout]).requires_grad_()
        for got, expected in zip(gradient(x, distribute_tensor(weight, mesh, [Replicate()])), truth, strict=True):
            assert isinstance(got, DTensor)
            error = (got.full_tensor().cpu() - expected).abs().max().item()
            assert error < 1e-9 * max(1.0, expected.abs().max().item()), (layout, error)


@on_ranks(2)
@pytest.mark.parametrize("replicates", [False, True])
def test_a_function_of_the_users_gets_dtensors_forward_and_backward(replicates: bool) -> None:
    with implicit_replication() if replicates else contextlib.nullcontext():
        for function in FUNCTIONS:
            check(function)


@on_ranks(2)
def test_gradients_of_gradients_of_a_function_of_the_users() -> None:
    for function in (Cubed.apply, Exponential.apply, Centred.apply, mixed, Same.apply):
        check(function, again=True)


@on_ranks(2)
def test_a_function_inside_hooks_of_saved_tensors_and_checkpoints() -> None:
    identity = lambda x: x  # noqa: E731
    hooks: list[Any] = [
        lambda: saved_tensors_hooks(identity, identity),
        lambda: saved_tensors_hooks(torch.clone, identity),
        lambda: saved_tensors_hooks(identity, lambda x: x * 1),
        save_on_cpu,
    ]

    def within(context: Any, function: Any) -> Any:
        def run(x: Any) -> Any:
            with context():
                return function(x) * x.sin()

        return run

    def checkpointed(function: Any, **options: Any) -> Any:
        return lambda x: checkpoint(function, x * 1, **options) * x

    for function in FUNCTIONS[:4]:
        for context in hooks:
            check(within(context, function), LAYOUTS[::2])
        check(checkpointed(function, use_reentrant=False), LAYOUTS[:4])
        check(checkpointed(function, use_reentrant=False, determinism_check="none"), LAYOUTS[:1])
        check(checkpointed(function, use_reentrant=True), LAYOUTS[:4])


@on_ranks(2)
def test_checkpoints_within_checkpoints_and_within_hooks_of_saved_tensors() -> None:
    def inner(x: Any) -> Any:
        return torch.tanh(x) * x.sum()

    for options in ({}, {"determinism_check": "none"}, {"early_stop": False}, {"preserve_rng_state": False}):

        def once(function: Any, options: Any = options) -> Any:
            return lambda x: checkpoint(function, x * 2, use_reentrant=False, **options) * x

        check(once(once(inner)))
        check(once(once(once(Cubed.apply))))

    def offloaded(x: Any) -> Any:
        with save_on_cpu():
            return checkpoint(inner, x * 2, use_reentrant=False) * x

    check(offloaded)


@on_ranks(2)
def test_what_a_function_gives_without_gradients() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.arange(6.0).reshape(3, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    same = Same.apply(x)
    assert isinstance(same, DTensor) and same.placements == (Shard(0),)
    assert torch.equal(same.full_tensor().cpu(), whole)
    written = x * 1
    assert Doubled.apply(written) is written
    assert torch.equal(written.full_tensor().cpu(), whole * 2)
    with torch.no_grad():
        assert torch.equal(Same.apply(x.requires_grad_()).full_tensor().cpu(), whole)


@on_ranks(2)
def test_gradients_of_plain_arguments_and_smaller_ones() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(torch.arange(3.0).double(), mesh, [Shard(0)]).requires_grad_()
    y = torch.tensor(2.0, dtype=torch.float64, device=device_type(), requires_grad=True)
    Mixed.apply(x, y)[0].sum().backward()
    assert type(y.grad) is torch.Tensor and y.grad.item() == 3.0
    assert torch.equal(x.grad.full_tensor().cpu(), torch.full((3,), 2.0).double())  # type: ignore[union-attr]
    row = distribute_tensor(torch.ones(1, 3).double(), mesh, [Shard(1)]).requires_grad_()
    Narrowed.apply(row, lambda x: x.expand(4, 3), lambda grad: grad).sum().backward()
    assert torch.equal(row.grad.full_tensor().cpu(), torch.full((1, 3), 4.0).double())  # type: ignore[union-attr]


@on_ranks(2)
def test_what_a_function_cannot_take_or_give_is_refused_on_all_ranks() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    average = DTensor.from_local(torch.ones(2, device=device_type()), mesh, [Partial("avg")]).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"Cubed: .* is given .* \(Partial\('avg'\),\).* reduce_partial\(\)"):
        Cubed.apply(average)
    assert Cubed.apply(average.reduce_partial()).full_tensor().tolist() == [1.0, 1.0]
    x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"Narrowed: .* returns .* \(Partial\('max'\),\).* reduce_partial"):
        Narrowed.apply(x, torch.amax, None)
    assert Narrowed.apply(x, lambda x: torch.amax(x).reduce_partial(), None).item() == 2.0
    with pytest.raises(NotImplementedError, match=r"Narrowed: .* shape \(1,\) that is a view .* moved: clone\(\) it"):
        Narrowed.apply(x, lambda x: x[1:2], None)
    assert Narrowed.apply(x, lambda x: x[1:2].clone(), None).item() == 1.0
    for wrong, told in (
        (lambda grad: torch.zeros(3, device=device_type()), r"is a plain tensor of shape \(3,\).*Give .* to_local\(\)"),
        (lambda grad: grad.to_local(), r"is a plain tensor of shape .*it has to be a DTensor"),
        (lambda grad: 1.0, "is float; it has to be a DTensor"),
    ):
        with pytest.raises(TypeError, match=f"Narrowed.backward: the gradient of argument 0.*{told}"):
            Narrowed.apply(x, lambda x: x * 2, wrong).sum().backward()
    Narrowed.apply(x, lambda x: x * 2, lambda grad: grad * 2).sum().backward()
    Narrowed.apply(x.to_local(), lambda x: x * 2, lambda grad: torch.full_like(grad, 2.0)).sum().backward()
    assert x.grad.full_tensor().tolist() == [4.0] * 3  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"of argument 0 has shape \(2,\), the argument has \(3,\)"):
        Narrowed.apply(x, lambda x: x * 2, lambda grad: grad[:2]).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backward() with create_graph, a cycle
        (grad,) = torch.autograd.grad(Doubled.apply(x * 1).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()
