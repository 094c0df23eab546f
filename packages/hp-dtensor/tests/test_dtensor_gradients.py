"""Gradients are the single-device program's, however a value is used, and moved no more often than needed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from hp_dtensor.torch.backward.autograd import reduce_partial_grads, shadows
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

R = Replicate()


def _mesh():
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


def _place(tensor, placement, mesh, grad=True):
    return distribute_tensor(tensor, mesh, [placement]).requires_grad_(grad)


def _close(got, want):
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want, rtol=1e-12, atol=1e-12)


def _rand(*shape):
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


@on_ranks(1, 2, 3)
def test_replicated_weight_used_with_sharded_rows():
    mesh, x, w = _mesh(), _rand(5, 4), _rand(4)
    w0 = w.clone().requires_grad_()
    (x * w0).square().sum().backward()
    weight = _place(w, R, mesh)
    (_place(x, Shard(0), mesh) * weight).square().sum().backward()
    assert weight.grad.placements == (R,)
    _close(weight.grad, w0.grad)


@on_ranks(2)
def test_a_value_read_three_times_is_summed_once():
    mesh, x = _mesh(), _rand(4, 6)
    weights = [_rand(8, 6) for _ in range(3)]
    x0 = x.clone().requires_grad_()
    sum(F.linear(x0, w).square().sum() for w in weights).backward()
    given = _place(x, R, mesh)
    hidden = given * 1.0  # not a leaf, as a model's hidden states
    q, k, v = (_place(w, Shard(0), mesh) for w in weights)
    with count_collectives() as forward:
        loss = (
            F.linear(hidden, q).square().sum() + F.linear(hidden, k).square().sum() + F.linear(hidden, v).square().sum()
        )
    with count_collectives() as backward:
        loss.backward()
    assert not dict(forward)
    assert dict(backward) == {"all_reduce": 1}
    _close(given.grad, x0.grad)


@on_ranks(2, 3)
def test_leaves_with_partial_gradients_are_summed_in_one_collective():
    mesh, x = _mesh(), _rand(6, 4)
    norms = [nn.LayerNorm(4, dtype=torch.float64, device=device_type()) for _ in range(3)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    reference = copy.deepcopy(norms)
    h = x
    for norm in reference:
        h = norm(h)
    h.square().sum().backward()
    h = _place(x, Shard(0), mesh, grad=False)
    for norm in norms:
        h = distribute_module(norm, mesh)(h)
    with count_collectives() as seen:
        h.square().sum().backward()
    assert dict(seen) == {"all_reduce": 1}
    for norm, want in zip(norms, reference, strict=True):
        _close(norm.weight.grad, want.weight.grad)
        _close(norm.bias.grad, want.bias.grad)


@on_ranks(2)
def test_a_leaf_used_both_ways_gets_both_parts():
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    w0 = w.clone().requires_grad_()
    ((x * w0).sum() + w0.square().sum()).backward()
    weight = _place(w, R, mesh)
    ((_place(x, Shard(0), mesh) * weight).sum() + weight.square().sum()).backward()
    _close(weight.grad, w0.grad)


@on_ranks(2)
def test_gradients_accumulate_over_backwards_and_reduce_early_on_request():
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    weight, given = _place(w, R, mesh), _place(x, Shard(0), mesh, grad=False)
    for _ in range(2):
        (given * weight).sum().backward()
    _close(weight.grad, 2 * x.sum(0))
    seen = []

    def early(grad):
        reduce_partial_grads([weight])
        seen.append(None if weight.grad is None else weight.grad.full_tensor().clone())

    weight.grad = None
    hidden = given * 1.0
    hidden.requires_grad_().register_hook(early)
    (hidden * weight).sum().backward()
    reduce_partial_grads([weight])
    _close(weight.grad, x.sum(0))


@on_ranks(2)
def test_autograd_grad_finds_what_shadows_collect():
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    weight, given = _place(w, R, mesh), _place(x, Shard(0), mesh)
    got = torch.autograd.grad((given * weight).square().sum(), [given, weight])
    w0, x0 = w.clone().requires_grad_(), x.clone().requires_grad_()
    want = torch.autograd.grad((x0 * w0).square().sum(), [x0, w0])
    assert [g.placements for g in got] == [(Shard(0),), (R,)]
    for one, other in zip(got, want, strict=True):
        _close(one, other)
    assert weight.grad is None
    unused = _place(w, R, mesh)
    with pytest.raises(RuntimeError, match="index 0 appears to not have been used|input 0.*not have been used"):
        torch.autograd.grad((given * weight).sum(), [unused])


@on_ranks(2)
def test_double_backward():
    mesh, x, w = _mesh(), _rand(4, 6), _rand(8, 6)
    x0, w0 = x.clone().requires_grad_(), w.clone().requires_grad_()
    (g0,) = torch.autograd.grad(F.linear(x0, w0).pow(3).sum(), x0, create_graph=True)
    g0.square().sum().backward()
    given, weight = _place(x, R, mesh), _place(w, Shard(0), mesh)
    hidden = given * 1.0
    (g,) = torch.autograd.grad(F.linear(hidden, weight).pow(3).sum(), hidden, create_graph=True)
    g.square().sum().backward()
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    mesh, x, w = _mesh(), _rand(4, 6), _rand(8, 6)
    x0, w0 = x.clone().requires_grad_(), w.clone().requires_grad_()
    F.gelu(F.linear(x0, w0)).square().sum().backward()
    given, weight = _place(x, R, mesh), _place(w, Shard(0), mesh)
    checkpoint(lambda h: F.gelu(F.linear(h, weight)), given, use_reentrant=reentrant).square().sum().backward()
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)


@on_ranks(2, 3)
@pytest.mark.parametrize("placement", [R, Shard(0), Shard(1), Partial()])
def test_backward_starts_from_any_layout(placement):
    mesh, x, cotangent = _mesh(), _rand(5, 4), _rand(5, 4)
    x0 = x.clone().requires_grad_()
    x0.square().backward(cotangent)
    given = _place(x, Shard(0), mesh)
    out = given.square().redistribute(mesh, [placement])
    for layout in (R, Shard(1)):
        given.grad = None
        out.backward(distribute_tensor(cotangent, mesh, [layout]), retain_graph=True)
        _close(given.grad, x0.grad)


@on_ranks(2)
def test_gather_then_varying_use_is_one_reduce_scatter():
    mesh, x, w = _mesh(), _rand(4, 6), _rand(8, 6)
    x0 = x.clone().requires_grad_()
    F.linear(x0, w).square().sum().backward()
    given = _place(x, Shard(0), mesh)
    hidden = given * 1.0
    gathered = hidden.redistribute(mesh, [R])
    out = F.linear(gathered, _place(w, Shard(0), mesh, grad=False))
    with count_collectives() as seen:
        out.square().sum().backward()
    assert dict(seen) == {"reduce_scatter": 1}
    _close(given.grad, x0.grad)


@on_ranks(2)
def test_rowwise_bias_is_added_once_and_has_a_whole_gradient():
    mesh, x, w, b = _mesh(), _rand(4, 6), _rand(3, 6), _rand(3)
    b0 = b.clone().requires_grad_()
    want = F.linear(x, w, b0)
    want.square().sum().backward()
    bias = _place(b, R, mesh)
    out = F.linear(_place(x, Shard(1), mesh), _place(w, Shard(1), mesh), bias)
    assert out.placements == (Partial(),)
    _close(out, want.detach())
    out.square().sum().backward()
    _close(bias.grad, b0.grad)


@on_ranks(2)
def test_hooks_see_dtensors_and_may_replace_gradients():
    mesh, x = _mesh(), _rand(4, 6)
    seen = []
    given = _place(x, Shard(0), mesh)
    hidden = given * 2
    hidden.register_hook(lambda g: seen.append((type(g).__name__, tuple(g.shape), g.placements)) or g * 3)
    hidden.sum().backward()
    assert seen == [("DTensor", (4, 6), (Shard(0),))]
    _close(given.grad, torch.full_like(x, 6.0))
    weight = _place(_rand(6), R, mesh)
    weight.register_hook(lambda g: g * 10)  # sees the whole gradient: such a leaf is not read through a shadow
    (_place(x, Shard(0), mesh, grad=False) * weight).sum().backward()
    assert not shadows(weight)
    _close(weight.grad, 10 * x.sum(0))


@on_ranks(2)
def test_failed_backward_leaves_nothing_behind():
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    weight, given = _place(w, R, mesh), _place(x, Shard(0), mesh)

    def fail(grad):
        raise ValueError("on purpose")

    hidden = given * 1.0
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        (hidden * weight).sum().backward()
    weight.grad = None
    (given * weight).sum().backward()
    _close(weight.grad, x.sum(0))


@on_ranks(2)
def test_to_local_takes_the_gradient_in_the_layout_that_it_is_told():
    mesh, x = _mesh(), _rand(4)
    rank = torch.distributed.get_rank()
    given = _place(x, R, mesh)
    (given.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    _close(given.grad, torch.full_like(x, 3.0))
    with pytest.raises(ValueError, match=r"grad_placements\[0\] is Shard\(0\).*it may be Replicate\(\) or Partial\(\)"):
        given.to_local(grad_placements=[Shard(0)])


@on_ranks(2)
def test_maximum_over_a_sharded_dim_splits_its_gradient_as_one_device_does():
    mesh = _mesh()
    x = torch.tensor([[1.0, 2.0], [2.0, 0.0], [2.0, 1.0], [0.0, 2.0]], dtype=torch.float64, device=device_type())
    x0 = x.clone().requires_grad_()
    x0.amax(0).sum().backward()
    given = _place(x, Shard(0), mesh)
    given.amax(0).sum().backward()
    _close(given.grad, x0.grad)


@on_ranks(2)
def test_parts_of_an_extreme_have_no_gradient_of_their_own() -> None:
    """Which rank's part is the maximum is not known in backward; a sum of equal gradients would be wrong."""
    mesh = init_device_mesh(device_type(), (2,))
    local = torch.ones(3, device=device_type(), requires_grad=True)
    for op in ("max", "min", "product"):
        with pytest.raises(NotImplementedError, match="backward cannot tell which rank's value counts"):
            DTensor.from_local(local, mesh, [Partial(op)])
        assert DTensor.from_local(local.detach(), mesh, [Partial(op)]).reduce_partial().shape == (3,)
