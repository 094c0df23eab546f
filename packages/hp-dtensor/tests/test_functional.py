"""The functional style, functions of one's own, functions on local parts, and dispatch skipped."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import (
    DFunction,
    Partial,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_value_and_grad,
)
from hp_testing import device_type, on_ranks


def whole(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device_type())


@pytest.mark.smoke
@on_ranks(2, 3)
def test_values_and_gradients_of_inputs_and_weights(ranks):
    mesh = init_device_mesh(device_type(), (ranks,))
    x, w, u = whole(5, 6), whole(7, 6, seed=1).requires_grad_(), whole(3, seed=2).requires_grad_()
    y = x.clone().requires_grad_()
    loss = (F.linear(y, w) ** 2).mean()
    by_y, by_w = torch.autograd.grad(loss, (y, w))

    def fn(x, weight):
        out = F.linear(x, weight)
        return (out**2).mean(), out

    d, dw, du = (
        distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in [(x, Replicate()), (w, Shard(0)), (u, Shard(0))]
    )
    (value, out), (grad, (weight_grad, unused)) = parallelize_value_and_grad(fn, 0, [dw, du], True)(d, dw)
    assert type(value) is torch.Tensor
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(out.full_tensor().detach(), F.linear(x, w).detach())
    assert grad.placements == (Replicate(),)
    torch.testing.assert_close(grad.full_tensor(), by_y)
    assert weight_grad.placements == (Shard(0),)
    torch.testing.assert_close(weight_grad.full_tensor(), by_w)
    torch.testing.assert_close(unused.full_tensor(), torch.zeros_like(u))
    assert dw.grad is None
    with pytest.raises(ValueError, match="scalar"):
        parallelize_value_and_grad(lambda x: x * 2)(d)


class Scaled(DFunction):
    _op_name = "mul"

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


@on_ranks(2)
def test_an_autograd_function_of_ones_own():
    mesh = init_device_mesh(device_type(), (2,))
    x, y = whole(5, 6).requires_grad_(), whole(5, 6, seed=1).requires_grad_()
    wanted = torch.autograd.grad((x * y * x).sum(), (x, y))
    for left in (Shard(0), Shard(1), Replicate()):
        for right in (Shard(0), Shard(1), Replicate()):
            a, b = distribute_tensor(x, mesh, [left]), distribute_tensor(y, mesh, [right])
            made = Scaled.apply(a, b)
            torch.testing.assert_close(made.full_tensor(), x * y)
            (made * a).sum().backward()
            torch.testing.assert_close(a.grad.full_tensor(), wanted[0])
            torch.testing.assert_close(b.grad.full_tensor(), wanted[1])
    assert type(Scaled.apply(x, y)) is torch.Tensor
    with pytest.raises(ValueError, match="mixed"):
        Scaled.apply(distribute_tensor(x, mesh, [Shard(0)]), y)
    made = Scaled.apply(*(distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y)))
    torch.testing.assert_close(made.full_tensor(), x * y)


class Unnamed(DFunction):
    @staticmethod
    def forward(ctx, x):
        return x


@on_ranks(2)
def test_a_function_names_a_rule():
    x = distribute_tensor(whole(4), init_device_mesh(device_type(), (2,)), [Shard(0)])
    with pytest.raises(ValueError, match="Unnamed is a DFunction without a rule: set its class attribute _op_name to"):
        Unnamed.apply(x)
    with mock.patch.object(Unnamed, "_op_name", "multiply"), pytest.raises(ValueError, match="Unknown rule 'multiply'"):
        Unnamed.apply(x)
    with mock.patch.object(Unnamed, "_op_name", "pointwise"):
        torch.testing.assert_close(Unnamed.apply(x).full_tensor(), whole(4))


@on_ranks(2)
def test_a_function_on_local_parts():
    mesh = init_device_mesh(device_type(), (2,))
    x = whole(4, 6)
    d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    doubled = custom_shard(lambda local: local * 2, mesh, [Shard(0)], in_placements=([Shard(0)],))
    out = doubled(d)
    torch.testing.assert_close(out.full_tensor().detach(), x * 2)
    out.sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), torch.full_like(x, 2.0))
    for one_result in ((Partial(),), ((Partial(),),), ([Partial()],)):
        total = custom_shard(lambda local: local.sum(0), mesh, one_result)(d.detach())
        assert total.placements == (Partial(),)
        torch.testing.assert_close(total.full_tensor(), x.sum(0))
    both = custom_shard(lambda local: (local.sum(0), 3), mesh, ([Partial()], None))
    total, three = both(d.detach())
    torch.testing.assert_close(total.full_tensor(), x.sum(0))
    assert three == 3
    columns = custom_shard(lambda local: local, mesh, [Shard(1)], in_placements=([Shard(1)],))
    with pytest.raises(ValueError, match="redistribute_inputs"):
        columns(d)
    moved = custom_shard(lambda local: local, mesh, [Shard(1)], in_placements=([Shard(1)],), redistribute_inputs=True)
    torch.testing.assert_close(moved(d).full_tensor().detach(), x)


@on_ranks(2)
def test_skipping_dispatch_nests():
    x = distribute_tensor(whole(4, 6), init_device_mesh(device_type(), (2,)), [Shard(0)])
    with SkipDTensorDispatch():
        assert tuple(x.shape) == (2, 6)
        with SkipDTensorDispatch():
            assert type(x + 1) is torch.Tensor
        assert tuple(x.shape) == (2, 6)
    assert tuple(x.shape) == (4, 6)
