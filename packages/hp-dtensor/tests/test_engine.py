"""What starts backward, and what runs in it: the user's code sees DTensors, gradients are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import functional
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]
R, P = Replicate(), Partial()
PLACEMENTS = (Shard(0), Shard(1), R)


def _mesh() -> Any:
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),))


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device_type())


def _place(tensor: torch.Tensor, mesh: Any, *placements: Any, grad: bool = True) -> DTensor:
    return distribute_tensor(tensor, mesh, placements).requires_grad_(grad)


def _part(tensor: torch.Tensor, mesh: Any) -> DTensor:
    """A leaf of which each rank holds another part of a sum."""
    count, rank = mesh.size(), mesh.get_local_rank()
    weight = 2.0 * (rank + 1) / (count * (count + 1))
    return DTensor.from_local(tensor * weight, mesh, [P]).requires_grad_()


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def _close(got: Any, want: Any) -> None:
    if isinstance(want, (list, tuple)):
        for a, b in zip(got, want, strict=True):
            _close(a, b)
    else:
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want, rtol=1e-12, atol=1e-12)


# ---- what runs in backward ----
def _blocks(x: Any, weight: Any, mask: Any, **options: Any) -> Any:
    def block(h: Any) -> Any:
        return F.linear(h * mask, weight).tanh() @ weight * mask

    return checkpoint(block, checkpoint(block, x, use_reentrant=False, **options), use_reentrant=False, **options)


@on_ranks(2, 3)
@pytest.mark.parametrize("start", [torch.autograd.grad, torch.autograd.backward], ids=["grad", "backward"])
def test_checkpoints_compute_again_on_dtensors(start: Any) -> None:
    """The mask needs no gradient; on three ranks of two rows, one holds nothing of what is cut by rows."""
    mesh, x, w, mask = _mesh(), _rand(2, 6), _rand(6, 6), (_rand(2, 6) > 0).double()
    want = torch.autograd.grad(_blocks(x0 := _leaf(x), w0 := _leaf(w), mask).square().sum(), [x0, w0])
    for rows in (Shard(0), R):
        for columns, masked in ((Shard(0), Shard(0)), (Shard(1), Shard(1)), (R, Shard(0)), (R, R)):
            given, weight = _place(x, mesh, rows), _place(w, mesh, columns)
            loss = _blocks(given, weight, _place(mask, mesh, masked, grad=False)).square().sum()
            if start is torch.autograd.grad:
                _close(start(loss, [given, weight]), want)
            else:
                start(loss)
                _close([given.grad, weight.grad], want)


DEBUG = pytest.param(
    "debug", marks=pytest.mark.not_on("torch-npu-sim", reason="torch's stack traces warn of the stand-in's library")
)


@on_ranks(2)
@pytest.mark.parametrize("option", [DEBUG, "no early stop", "selective"])
def test_checkpoints_with_options(option: str) -> None:
    options: dict[str, Any] = {
        "debug": {"debug": True},
        "no early stop": {"early_stop": False},
        "selective": {
            "context_fn": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        },
    }[option]
    mesh, x, w, mask = _mesh(), _rand(4, 6), _rand(6, 6), (_rand(4, 6) > 0).double()
    want = torch.autograd.grad(_blocks(x0 := _leaf(x), w0 := _leaf(w), mask).square().sum(), [x0, w0])
    given, weight = _place(x, mesh, Shard(0)), _place(w, mesh, Shard(0))
    made = _blocks(given, weight, _place(mask, mesh, Shard(0), grad=False), **options)
    _close(torch.autograd.grad(made.square().sum(), [given, weight]), want)


@on_ranks(2)
@pytest.mark.parametrize("start", [torch.autograd.grad, torch.autograd.backward], ids=["grad", "backward"])
def test_hooks_compute_on_dtensors(start: Any) -> None:
    mesh, x = _mesh(), _rand(4, 6)
    given, seen = _place(x, mesh, Shard(0)), []
    hidden = given * 2
    hidden.register_hook(lambda g: seen.append((type(g), tuple(g.shape), g.square().sum().item())))
    start(hidden.square().sum(), inputs=[given])
    assert [kind for kind, _, _ in seen] == [DTensor] and seen[0][1] == (4, 6)
    torch.testing.assert_close(seen[0][2], 16 * x.square().sum().item())


# ---- what backward starts from, and ends at ----
@on_ranks(2)
def test_a_plain_loss_of_dtensors() -> None:
    mesh, x, w = _mesh(), _rand(4, 6), _rand(6)
    want = torch.autograd.grad((_leaf(x) * (w0 := _leaf(w))).square().sum(), w0)
    given = _place(x, mesh, Shard(0), grad=False)
    for start in (
        lambda loss, leaf: loss.backward(inputs=[leaf]),
        lambda loss, leaf: torch.autograd.backward(loss, inputs=leaf),
        lambda loss, leaf: torch.autograd.backward([loss], [torch.ones_like(loss)], inputs=[leaf]),
        lambda loss, leaf: setattr(leaf, "grad", torch.autograd.grad(loss, leaf)[0]),
    ):
        weight = _place(w, mesh, R)
        start((given * weight).square().sum().full_tensor(), weight)
        _close([weight.grad], want)
    kept = (given * weight).square().sum().full_tensor()
    with pytest.raises(RuntimeError, match=r"gradient edge, .* of a DTensor leaf of shape \(6,\) .* ask for it before"):
        get_gradient_edge(weight)  # a plain loss would find nothing there, and backward say nothing
    kept.backward()


@on_ranks(2)
@pytest.mark.parametrize("plain", [True, False])
def test_the_gradient_edge_of_a_replicated_leaf(plain: bool) -> None:
    mesh, x, w = _mesh(), _rand(4, 6), _rand(6)
    [want] = torch.autograd.grad((_leaf(x) * (w0 := _leaf(w))).square().sum(), w0)
    given, weight = _place(x, mesh, Shard(0), grad=False), _place(w, mesh, R)
    edge = get_gradient_edge(weight)
    loss = (given * weight).square().sum()
    loss = loss.full_tensor() if plain else loss
    [got] = torch.autograd.grad(loss, [edge], retain_graph=True)
    torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want)
    loss.backward(inputs=[edge])
    _close([weight.grad], [want])


@on_ranks(2)
def test_a_gradient_for_each_row_of_a_batch() -> None:
    mesh, x, eye = _mesh(), _rand(4, 6), torch.eye(6, dtype=torch.float64, device=device_type())
    want = torch.autograd.grad((x0 := _leaf(x)).square().sum(0), x0, eye, is_grads_batched=True)
    for placement in PLACEMENTS:
        for start in PLACEMENTS:
            given = _place(x, mesh, placement)
            starts = _place(eye, mesh, start, grad=False)
            _close(torch.autograd.grad(given.square().sum(0), given, starts, is_grads_batched=True), want)
    given = _place(x, mesh, Shard(0))
    with pytest.raises(RuntimeError, match=r"one or more; got shapes \[\(\)\]"):
        torch.autograd.grad(given.sum(), given, torch.ones((), dtype=torch.float64), is_grads_batched=True)


def _cube(x: Any) -> Any:
    return x**3


def _energy(x: Any) -> Any:
    return (x**3).sum() * x.square().sum()


FUNCTIONALS: dict[str, Callable[[Any], Any]] = {
    "jacobian": lambda x: functional.jacobian(_cube, x),
    "jacobian with a graph": lambda x: functional.jacobian(_cube, x, create_graph=True).detach(),
    "hessian": lambda x: functional.hessian(_energy, x),
    "vjp": lambda x: functional.vjp(_cube, x, x.detach())[1],
    "jvp": lambda x: functional.jvp(_cube, x, x.detach())[1],
    "hvp": lambda x: functional.hvp(_energy, x, x.detach())[1],
    "vhp": lambda x: functional.vhp(_energy, x, x.detach())[1],
}


@on_ranks(2)
@pytest.mark.parametrize("name", FUNCTIONALS)
def test_functionals(name: str) -> None:
    mesh, x = _mesh(), _rand(5)
    for placement in (Shard(0), R):
        _close(FUNCTIONALS[name](_place(x, mesh, placement)), FUNCTIONALS[name](_leaf(x)))


@on_ranks(2)
def test_errors_of_gradients_to_start_from() -> None:
    mesh, x = _mesh(), _rand(4, 6)
    given = _place(x, mesh, Shard(0))
    for call in (lambda g: (given * 2).backward(g), lambda g: torch.autograd.grad(given * 2, given, g)):
        with pytest.raises(RuntimeError, match="can be implicitly created only for scalar outputs, output 0 is a DT"):
            call(None)
        with pytest.raises(RuntimeError, match=r"grad_output\[0\] has a shape of \(4, 5\) and output\[0\] has a shape"):
            call(_place(x[:, :5].clone(), mesh, Shard(0), grad=False))
        with pytest.raises(RuntimeError, match=r"plain tensor of shape \(4, 6\).*local part has \(2, 6\); pass a DT"):
            call(x)
        call(_place(x, mesh, Shard(0), grad=False))
        call(x.chunk(2)[mesh.get_local_rank()])
    with pytest.raises(RuntimeError, match="cannot be empty"):
        given.sum().backward(inputs=[])


# ---- gradients of gradients of parts of a sum ----
@on_ranks(2, 3)
def test_the_gradient_of_a_gradient_by_parts_of_a_sum() -> None:
    mesh, x, v = _mesh(), _rand(4, 6), _rand(6)

    def second(x: Any, v: Any) -> Any:
        (first,) = torch.autograd.grad(((x * v) ** 3).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return first, again, *torch.autograd.grad(again.square().sum() + first.sum(), [x, v])

    want = [made.detach() for made in second(_leaf(x), _leaf(v))]
    for placement in (R, Shard(0)):
        _close([made.detach() for made in second(_part(x, mesh), _place(v, mesh, placement))], want)
    given = _part(x, mesh)
    (first,) = torch.autograd.grad((given**3).sum(), given, create_graph=True)
    first.square().sum().backward()
    _close(given.grad, 36 * x**3)


@on_ranks(2)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_the_gradient_of_a_gradient_through_a_move_to_parts_of_a_sum(placement: Any) -> None:
    mesh, x = _mesh(), _rand(4, 6)

    def second(x: Any, move: Callable[[Any], Any]) -> Any:
        (first,) = torch.autograd.grad((move(x * 2) ** 3).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return [first.detach(), again.detach(), *torch.autograd.grad(again.square().sum(), x)]

    want = second(_leaf(x), lambda y: y)
    _close(second(_place(x, mesh, placement), lambda y: y.redistribute(mesh, [P])), want)


@on_ranks(2)
def test_a_graph_on_the_grad_of_parts_of_a_sum() -> None:
    mesh, x = _mesh(), _rand(4)
    given = _part(x, mesh)
    with pytest.warns(UserWarning, match="create_graph=True"):
        (given**3).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"placed \(Partial\(\),\) after backward\(create_graph=True\).*d.grad\("):
        _ = given.grad
    (grad,) = torch.autograd.grad((given**3).sum(), given, create_graph=True)
    whole = _part(x, mesh).detach().reduce_partial().requires_grad_()
    (whole**3).sum().backward(create_graph=True)
    _close([grad.detach(), whole.grad.detach()], [3 * x**2] * 2)


@on_ranks(2)
def test_a_gradient_of_parts_of_a_sum_is_written() -> None:
    mesh, whole = _mesh(), _rand(4)

    def second(x: Any) -> Any:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.mul_(2.0)
        return torch.autograd.grad(first.square().sum(), x)

    _close(second(_part(whole, mesh)), second(_leaf(whole)))


# ---- gradients of gradients on a rank without elements ----
def _written_view(x: Any) -> Any:
    made = x.unsqueeze(-1)
    made.mul_(2)
    return made.square()


def _written_source(x: Any) -> Any:
    made = x.transpose(0, 1)
    x.mul_(2)
    return made.square()


def _attention(x: Any) -> Any:
    rows = x.unflatten(-1, (2, 2))[:, None]
    return F.scaled_dot_product_attention(rows, rows, rows, attn_mask=rows.mT @ rows)


ON_NOTHING: dict[str, Callable[[Any], Any]] = {
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: x.cummax(1)[0],
    "var": lambda x: x.var(1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "attention": _attention,
    "written view": _written_view,
    "written source": _written_source,
}


@on_ranks(3)
@pytest.mark.parametrize("name", ON_NOTHING)
def test_a_rank_without_elements_is_in_the_graph_of_the_others(name: str) -> None:
    mesh, whole = _mesh(), _rand(2, 4)

    def gradients(x: Any, move: Callable[[Any], Any]) -> list[Any]:
        (first,) = torch.autograd.grad(ON_NOTHING[name](move(x * 1)).sum(), x, create_graph=True)
        again = torch.autograd.grad(first.square().sum(), x) if first.requires_grad else ()
        return [first.requires_grad, first.detach(), *again]

    is_recorded, *want = gradients(_leaf(whole), lambda y: y * 1)
    got_recorded, *got = gradients(_place(whole, mesh, R), lambda y: y.redistribute(placements=[Shard(0)]))
    assert got_recorded == is_recorded
    _close(got, want)


@on_ranks(2)
def test_a_rank_without_a_run_of_a_matrix_takes_part():
    mesh = init_device_mesh(device_type(), (2,))
    x = torch.arange(6.0, device=device_type()).view(2, 3)
    ragged = distribute_tensor(x, mesh, [RaggedShard((0, 1), (1, 0))]).requires_grad_()
    (ragged * 2).sin().sum().backward()
    assert torch.equal(ragged.grad.full_tensor(), 2 * (2 * x).cos())


RECORDED = {
    "embedding": lambda x: F.embedding(
        torch.zeros(1, dtype=torch.int64, device=device_type()), x.view(1, 1), padding_idx=None
    ),
    "unsqueeze_": lambda x: x.clone().unsqueeze_(0),
    "squeeze_": lambda x: x.view(1, 1).clone().squeeze_(0),
    "t_": lambda x: x.view(1, 1).clone().t_(),
    "a write to a part of einsum's": lambda x: torch.einsum("bi,bi->b", x.view(1, 1), x.view(1, 1)).put_(
        torch.zeros(1, dtype=torch.int64, device=device_type()), x.detach() * 2, accumulate=True
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", RECORDED)
def test_a_rank_without_elements_records_what_the_others_record(name):
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.full((1,), 0.5, dtype=torch.float64, device=device_type(), requires_grad=True)
    x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
    outcomes = []
    for value in (whole, x):
        with implicit_replication():
            y = RECORDED[name](value)
        (first,) = torch.autograd.grad((y * 3).sum() + y.pow(3).sum(), [value], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), [value])
        outcomes.append((y, first, second))
    for expected, own in zip(*outcomes, strict=True):
        assert own.shape == expected.shape
        assert torch.equal(own.full_tensor(), expected)
