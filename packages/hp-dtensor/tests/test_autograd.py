"""What autograd offers, on DTensors: graphs kept and rebuilt, hooks, functions of the user's, modules on a 2-d mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

R, P = Replicate(), Partial()


def _mesh(*shape: int) -> Any:
    return init_device_mesh(device_type(), shape or (torch.distributed.get_world_size(),))


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


def _place(tensor: torch.Tensor, mesh: Any, *placements: Any, grad: bool = True) -> DTensor:
    return distribute_tensor(tensor, mesh, placements).requires_grad_(grad)


def _close(got: Any, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want, rtol=1e-12, atol=1e-12)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


# ---- backward ----
@on_ranks(2, 3)
def test_a_graph_that_is_kept_runs_twice() -> None:
    mesh, x, w = _mesh(), _rand(5, 4), _rand(4)
    x0, w0 = _leaf(x), _leaf(w)
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, R)
    for a, b, total in ((x0, w0, None), (given, weight, None)):
        total = (a * b).square().sum()
        total.backward(retain_graph=True)
        total.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            total.backward()
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)


@on_ranks(2)
def test_losses_of_every_layout() -> None:
    mesh, x = _mesh(), _rand(4, 3)
    x0 = _leaf(x)
    x0.square().sum().backward()
    for layout in (R, P, Partial("avg")):
        given = _place(x, mesh, Shard(0))
        given.square().sum().redistribute(mesh, [layout]).backward()
        _close(given.grad, x0.grad)
    given = _place(x, mesh, Shard(0))
    given.square().sum().reshape(1).redistribute(mesh, [Shard(0)]).backward()
    _close(given.grad, x0.grad)
    for call in (
        lambda v: v.backward(),
        lambda v: torch.autograd.backward([v]),
        lambda v: torch.autograd.grad(v, given),
    ):
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            call(given[:2] * 2)  # one row a rank


@on_ranks(2)
def test_several_losses_at_once() -> None:
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    x0, w0 = _leaf(x), _leaf(w)
    torch.autograd.backward([(x0 * w0).sum(), x0.square()], [None, torch.ones_like(x)])
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, R)
    torch.autograd.backward(
        [(given * weight).sum(), given.square()], [None, _place(torch.ones_like(x), mesh, R, grad=False)]
    )
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)
    only = _place(x, mesh, Shard(0))
    (only * weight).sum().backward(inputs=[only])
    _close(weight.grad, w0.grad)
    (only.detach() * weight).sum().backward(inputs=[weight])
    _close(weight.grad, 2 * w0.grad)


@on_ranks(2)
def test_without_gradients() -> None:
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, R)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = given * weight
            assert not out.requires_grad and out.grad_fn is None
            _close(out, x * w)
            rows = _place(x.t().clone(), mesh, Shard(0), grad=False)
            hidden = given * 2
            for _ in range(2):  # moved, and found where that is remembered
                _close(hidden @ rows, 2 * x @ x.t())
    out = given * weight  # what was remembered without gradients is not used with them
    assert out.requires_grad
    out.sum().backward()
    _close(weight.grad, x.sum(0))
    with torch.no_grad():
        weight.mul_(2)
        out = given * weight
        with torch.enable_grad():
            inner = given * weight
    assert not out.requires_grad and inner.requires_grad
    _close(inner, x * w * 2)


@on_ranks(2, 3)
def test_gradients_of_gradients_of_leaves_that_vary() -> None:
    mesh, x, w = _mesh(), _rand(6, 4), _rand(4)
    x0, w0 = _leaf(x), _leaf(w)
    gx, gw = torch.autograd.grad((x0 * w0).pow(3).sum(), [x0, w0], create_graph=True)
    (gx.square().sum() + gw.square().sum()).backward()
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, R)
    hx, hw = torch.autograd.grad((given * weight).pow(3).sum(), [given, weight], create_graph=True)
    assert hx.placements == (Shard(0),) and hw.placements == (R,)
    _close(hx.detach(), gx.detach())
    _close(hw.detach(), gw.detach())
    (hx.square().sum() + hw.square().sum()).backward()
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)


@on_ranks(2)
def test_a_penalty_on_gradients_by_backward() -> None:
    mesh, x, w = _mesh(), _rand(4, 6), _rand(5, 6)
    x0, w0 = _leaf(x), _leaf(w)
    given, weight = _place(x, mesh, R), _place(w, mesh, Shard(0))
    for a, b in ((x0, w0), (given, weight)):
        (g,) = torch.autograd.grad(F.linear(a, b).tanh().sum(), a, create_graph=True)
        (F.linear(a, b).sum() + g.square().sum()).backward()
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)


# ---- hooks ----
@on_ranks(2)
def test_hooks_of_modules_see_the_whole_gradient() -> None:
    mesh = _mesh()
    linear = nn.Linear(3, 4, dtype=torch.float64, device=device_type())
    plain = copy.deepcopy(linear)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Shard(0)]))
    linear.bias = nn.Parameter(distribute_tensor(linear.bias.data, mesh, [Shard(0)]))
    x = _rand(5, 3)
    x0, given = _leaf(x), _place(x, mesh, R)
    seen = []
    for module, value in ((plain, x0), (linear, given)):
        module.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0], go[0])))
        module.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
        module(value).square().sum().backward()
    (plain_in, plain_out), (mine_in, mine_out) = seen
    _close(mine_in, plain_in)  # the input is replicated, and what is partial of its gradient is summed
    _close(mine_out, plain_out)
    _close(given.grad, x0.grad)
    _close(linear.weight.grad, plain.weight.grad)


@on_ranks(2)
def test_hooks_of_tensors() -> None:
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, R)
    seen: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    handle = given.register_hook(lambda g: seen.append(g))
    (given * weight).sum().backward()
    assert sorted(str(g.placements) for g in seen) == ["(Replicate(),)", "(Shard(0),)"]
    assert {tuple(g.shape) for g in seen} == {(3,), (4, 3)}
    _close(weight.grad, x.sum(0))
    handle.remove()
    weight.grad = None
    (given * weight).sum().backward()
    assert len(seen) == 3
    hidden = given * 2
    hidden.retain_grad()
    hidden.square().sum().backward()
    assert hidden.grad.placements == (Shard(0),)
    _close(hidden.grad, 4 * x)


@on_ranks(2)
def test_a_hook_that_is_added_between_two_uses() -> None:
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    given, weight = _place(x, mesh, Shard(0), grad=False), _place(w, mesh, R)
    (given * weight).sum().backward()
    weight.register_hook(lambda g: g * 10)
    weight.grad = None
    (given * weight).sum().backward()
    _close(weight.grad, 10 * x.sum(0))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad * ctx.scale, None


@on_ranks(2)
def test_functions_of_the_user_run_on_local_tensors() -> None:
    mesh, x, w = _mesh(), _rand(4, 3), _rand(3)
    x0, w0 = _leaf(x), _leaf(w)
    (Square.apply(x0, 0.5) * w0).sum().backward()
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, R)
    out = DTensor.from_local(Square.apply(given.to_local(), 0.5), mesh, [Shard(0)])
    (out * weight).sum().backward()
    _close(given.grad, x0.grad)
    _close(weight.grad, w0.grad)


# ---- what is remembered ----
@on_ranks(2)
def test_a_value_that_is_written_to_is_moved_again() -> None:
    mesh, x, w = _mesh(), _rand(4, 6), _rand(8, 6)
    given, weight = _place(x, mesh, Shard(0)) * 1.0, _place(w, mesh, Shard(0), grad=False)
    first = F.linear(given, weight)
    with count_collectives() as counted:
        F.linear(given, weight)
    assert not sum(counted.values()), "gathered once"
    given.mul_(2)
    _close(F.linear(given, weight).detach(), 2 * F.linear(x, w))
    _close(first.detach(), F.linear(x, w))


@on_ranks(2)
def test_backward_forgets_what_was_moved() -> None:
    mesh, x, w = _mesh(), _rand(4, 6), _rand(8, 6)
    given, weight = _place(x, mesh, R), _place(w, mesh, Shard(0))
    for _ in range(3):  # the graph behind a remembered value is gone after backward
        hidden = given * 1.0
        (F.linear(hidden, weight).sum() + F.linear(hidden, weight).sum()).backward()
    _close(given.grad, 6 * w.sum(0).expand(4, 6))


@on_ranks(2, 3)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    mesh, x, w, s = _mesh(), _rand(6, 4), _rand(4, 4), _rand(4)
    results = []
    for given, weight, scale in (
        (_leaf(x), _leaf(w), _leaf(s)),
        (_place(x, mesh, Shard(0)), _place(w, mesh, R), _place(s, mesh, R)),
    ):

        def block(h: Any, weight: Any = weight, scale: Any = scale) -> Any:
            return F.dropout(F.rms_norm(F.linear(h, weight), (4,), scale), 0.25).tanh()

        torch.manual_seed(3)
        out = checkpoint(block, checkpoint(block, given, use_reentrant=reentrant), use_reentrant=reentrant)
        out.square().sum().backward()
        results.append((out.detach(), given.grad, weight.grad, scale.grad))
    for mine, theirs in zip(results[1], results[0]):
        _close(mine, theirs)


# ---- two axes ----
@on_ranks(4)
def test_a_data_and_tensor_parallel_mlp() -> None:
    mesh = _mesh(2, 2)
    x, up, down, scale = _rand(6, 5, 4), _rand(7, 4), _rand(4, 7), _rand(4)
    plain = [_leaf(t) for t in (x, up, down, scale)]
    mine = [
        _place(x, mesh, Shard(0), R),
        _place(up, mesh, R, Shard(0)),
        _place(down, mesh, R, Shard(1)),
        _place(scale, mesh, R, R),
    ]
    for given in (plain, mine):
        a, b, c, s = given
        h = F.rms_norm(a, (4,), s)
        out = (a + F.linear(F.gelu(F.linear(h, b)), c)) * s
        if given is mine:
            with count_collectives() as counted:
                loss = out.square().mean()
                loss.backward()
        else:
            out.square().mean().backward()
    for a, b in zip(mine, plain):
        _close(a.grad, b.grad)
    assert out.placements in ((Shard(0), R), (Shard(0), P))
    # backward: h over tp, then the leaves over dp, those of one set of axes together
    assert sum(counted.values()) <= 5, dict(counted)


@on_ranks(4)
def test_a_leaf_that_varies_on_each_axis_by_turns() -> None:
    mesh, x, w = _mesh(2, 2), _rand(4, 6), _rand(6)
    w0 = _leaf(w)
    ((x * w0).sum() + (x.square() * w0).sum() + (x.t() * w0[:, None]).pow(3).sum() + w0.sum()).backward()
    weight = _place(w, mesh, R, R)
    a, b, c = (_place(x, mesh, *p, grad=False) for p in ((Shard(0), R), (R, Shard(0)), (Shard(0), Shard(1))))
    loss = (a * weight).sum() + (b.square() * weight).sum() + (c.t() * weight[:, None]).pow(3).sum() + weight.sum()
    loss.backward()
    _close(weight.grad, w0.grad)
