"""Elementwise functions that write their tensor: with and without a plan the values of a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

CALLS: dict[str, Any] = {
    "add_": lambda x, y, z: x.add_(y, alpha=0.5).add_(1.5),
    "sub_": lambda x, y, z: x.sub_(y).sub_(2),
    "mul_": lambda x, y, z: x.mul_(y).mul_(0.5),
    "div_": lambda x, y, z: x.div_(z).div_(3.0, rounding_mode="floor"),
    "lerp_": lambda x, y, z: x.lerp_(y, 0.3).lerp_(z, weight=0.2),
    "addcmul_": lambda x, y, z: x.addcmul_(y, z, value=0.5).addcmul_(y, z),
    "addcdiv_": lambda x, y, z: x.addcdiv_(y, z, value=-0.5).addcdiv_(tensor1=y, tensor2=z),
    "copy_": lambda x, y, z: x.copy_(y),
    "adam": lambda x, y, z: x.addcdiv_(y, (z.sqrt() / 0.9).add_(1e-8), value=-0.1),
}


def operands(*placements: Any) -> tuple[list[torch.Tensor], list[DTensor]]:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("a",))
    torch.manual_seed(0)
    whole = [torch.rand(5, 3, dtype=torch.float64) + 1 for _ in placements]
    made = [distribute_tensor(each.to(device_type()), mesh, [p]) for each, p in zip(whole, placements, strict=True)]
    return whole, made


def same(ours: DTensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours.full_tensor().cpu(), expected, rtol=1e-12, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("other", [Shard(0), Replicate(), Shard(1)], ids=str)
def test_values_in_one_layout_and_in_several(name: str, other: Any):
    whole, made = operands(Shard(0), other, other)
    for _ in range(2):  # the second time a plan is there
        out = CALLS[name](*made)
        assert out is made[0] and out.placements == (Shard(0),)
        same(out, CALLS[name](*whole))


@on_ranks(2)
def test_what_is_a_sum_is_not_written_part_by_part():
    (whole, factor), (x, _) = operands(Shard(0), Shard(0))
    parts = [distribute_tensor(t.to(device_type()), x.device_mesh, [Partial()]) for t in (whole, factor)]
    same(parts[0].mul_(parts[1]), whole * factor)  # one operand is summed first
    same(parts[0].mul_(2.0), whole * factor * 2)
    same(parts[0].add_(parts[1]), whole * factor * 2 + factor)
    with pytest.raises(RuntimeError, match="add_"):
        parts[0].add_(1.5)
    same(parts[0].reduce_partial().add_(1.5), whole * factor * 2 + factor + 1.5)


@on_ranks(2)
def test_gradients_and_leaves():
    (a, b), (x, y) = operands(Shard(0), Shard(0))
    for tensor in (a, b, x, y):
        tensor.requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(y)
    for first, second in ((a, b), (x, y)):
        (first * 1.0).mul_(second).addcmul_(first, second, value=0.5).sum().backward()
    same(x.grad, a.grad)
    same(y.grad, b.grad)


@on_ranks(2)
def test_writes_to_what_was_taken_by_an_index_reach_the_whole():
    (whole, _), (x, _) = operands(Shard(0), Shard(0))
    x[1:4].mul_(2.0)
    whole[1:4].mul_(2.0)
    same(x, whole)


@on_ranks(2)
def test_plain_tensors_are_refused():
    (_, _), (x, y) = operands(Shard(0), Shard(0))
    plain = torch.ones(5, 3, dtype=torch.float64, device=device_type())
    for call in (lambda: x.add_(plain), lambda: x.addcmul_(y, plain), lambda: x.lerp_(plain, 0.5)):
        with pytest.raises(ValueError, match="plain tensor"):
            call()


@on_ranks(2)
def test_what_is_asked_of_a_tensor():
    for _ in range(2):
        assert operands(Shard(0))[1][0].is_sparse is False
        assert not torch.is_complex(operands(Shard(0))[1][0])
        assert torch.is_complex(operands(Shard(0))[1][0] * 1j)


@on_ranks(2)
@pytest.mark.parametrize("target", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("source", [Shard(0), Shard(1), Partial(), Replicate()], ids=str)
def test_what_was_redistributed_can_be_written(source: Any, target: Any):
    (whole,), (x,) = operands(source)
    x.requires_grad_()
    made = (x * 1.0).redistribute(placements=[target])
    assert made.mul_(2.0) is made
    same(made.detach(), whole * 2)
    made.sum().backward()
    same(x.grad, torch.full_like(whole, 2.0))


RENORM = pytest.param(
    "renorm_",
    marks=pytest.mark.not_on("torch-npu-sim", reason="it casts floats, which the stand-in of the kernel Cast does not"),
)


@on_ranks(2)
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", ["tril_", "triu_", "cumsum_", "cumprod_", "fill_diagonal_", RENORM])
def test_functions_that_write_a_gathered_value(name: str, watched: bool) -> None:
    """torch sets hooks on the tensor that a written view is of; here that is a DTensor."""
    arguments = {"cumsum_": (0,), "cumprod_": (1,), "fill_diagonal_": (2.0,), "renorm_": (2, 0, 1.0)}.get(name, ())
    for placement in (Shard(0), Shard(1), Replicate()):
        [whole], [given] = operands(placement)
        made = (given.requires_grad_(watched) * 1).__getattribute__(name)(*arguments)
        want = (whole.requires_grad_(watched) * 1).__getattribute__(name)(*arguments)
        same(made.detach(), want.detach())
        if watched:
            made.square().sum().backward()
            want.square().sum().backward()
            same(given.grad, whole.grad)


@on_ranks(2)
def test_real_and_imaginary_parts_are_set() -> None:
    mesh, whole = init_device_mesh(device_type(), (2,)), torch.rand(4, 4, dtype=torch.complex128, device=device_type())
    made = distribute_tensor(whole, mesh, [Shard(0)])
    made.real = distribute_tensor(whole.imag.clone(), mesh, [Shard(1)])
    made.imag = made.real * 2
    assert torch.equal(made.full_tensor(), torch.complex(whole.imag, whole.imag * 2))
    assert made._backward_hooks is None and made.grad_fn is None


@on_ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_the_parts_of_a_reduction_are_filled(op: str) -> None:
    mesh, value = init_device_mesh(device_type(), (2,)), -2.5
    for fill in (lambda t: t.fill_(value), lambda t: torch.fill_(t, value), lambda t: t.mul(0).zero_()):
        given = DTensor.from_local(torch.full((3,), 7.0, device=device_type()), mesh, [Partial(op)])
        made = fill(given)
        assert given.placements == (Partial(op),)
        torch.testing.assert_close(made.full_tensor(), fill(torch.full((3,), 7.0, device=device_type())))


@on_ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_filling_with_a_value_that_requires_gradients(op: str) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    value = distribute_tensor(torch.tensor(2.0, device=device_type()), mesh, [Replicate()]).requires_grad_()
    part = torch.ones(3, device=device_type(), requires_grad=True)
    given = DTensor.from_local(part, mesh, [Partial(op)]) * 1
    given.fill_(value)
    given.square().sum().backward()
    assert value.grad is not None and part.grad is not None
    torch.testing.assert_close(value.grad.full_tensor(), torch.tensor(12.0, device=device_type()))
    torch.testing.assert_close(part.grad, torch.zeros_like(part))


@on_ranks(2)
def test_what_a_partial_written_in_place_would_need_is_said() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    given = DTensor.from_local(torch.ones(3, device=device_type()), mesh, [Partial()])
    with pytest.raises(RuntimeError, match=r"add_: .* is Partial\(\) on axis 0 .*Partial: x = x\.reduce_partial\(\)"):
        given.add_(1.0)
    given = given.reduce_partial()
    assert given.add_(1.0).full_tensor().tolist() == [3.0] * 3


@on_ranks(2)
def test_a_function_with_inplace_writes_its_operand_or_refuses() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.tensor([0.3, -1.2, 0.7, -2.0], dtype=torch.float64)
    for func in (F.relu, F.silu, F.leaky_relu, F.hardtanh, F.elu):
        x = distribute_tensor(whole, mesh, [Shard(0)]) * 1
        func(x, inplace=True)
        assert torch.allclose(x.full_tensor().cpu(), func(whole))
        partial = distribute_tensor(whole, mesh, [Partial()]) * 1
        with pytest.raises(RuntimeError, match="inplace=True.* it would have to be moved .* leave inplace=True out"):
            func(partial, inplace=True)
        moved = partial.redistribute(placements=[Replicate()])
        for made in (func(moved, inplace=True), moved, func(partial)):
            assert torch.allclose(made.full_tensor().cpu(), func(whole))


@on_ranks(2)
def test_dims_of_size_one_join_and_leave_a_ragged_tensor() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.arange(6.0).view(2, 3)
    x = distribute_tensor(whole, mesh, [RaggedShard((0, 1), (1, 2))])
    assert torch.equal(x.unsqueeze_(0).full_tensor().cpu(), whole[None])
    assert torch.equal((x * 2).full_tensor().cpu(), whole[None] * 2)
    assert torch.equal(x.squeeze_(0).full_tensor().cpu(), whole)


@on_ranks(2)
def test_broadcast_tensors_gives_back_what_has_the_shape_already() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    a, b = torch.broadcast_tensors(x, x[:1])
    x.data = x.data + 1
    assert a is x and torch.equal(b.full_tensor().cpu(), torch.zeros(4))


@on_ranks(2)
def test_dims_of_size_one_join_and_leave_a_tensor_of_which_a_rank_has_nothing() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    whole = torch.arange(5.0).view(1, 5)
    for dim in (0, 1, 2):
        x = distribute_tensor(whole, mesh, [Shard(0)]).clone()
        x.unsqueeze_(dim)
        assert tuple(x.to_local().shape) == tuple(x._spec.local_shape)
        assert torch.equal(x.reshape(5, 1).full_tensor().cpu(), whole.view(5, 1))
        assert torch.equal((x.squeeze_(dim) * 2).full_tensor().cpu(), whole.unsqueeze(dim).squeeze(dim) * 2)
        assert tuple(x.to_local().shape) == tuple(x._spec.local_shape)


OVERLAPPING: dict[str, Any] = {
    "columns": lambda x: x[:, 1:].add_(x[:, :-1]),
    "rows": lambda x: x[1:].copy_(x[:-1]),
    "one of three": lambda x: x[:, 1:].addcmul_(x[:, 1:], x[:, :-1]),
    "transposed": lambda x: x.add_(x.t()),
    "flat": lambda x: x.view(-1)[1:].add_(x.view(-1)[:-1]),
    "list": lambda x: torch._foreach_add_([x[:, 1:]], [x[:, :-1]]),
    "out": lambda x: torch.add(x[:, :-1], 1, out=x[:, 1:]),
    "out of a list": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1, out=x),
    "expanded": lambda x: x.expand(3, 4, 4).add_(1),
    "expanded column": lambda x: x[:, :1].expand(4, 4).mul_(0.5),
}
CLONED: dict[str, Any] = {
    "transposed": lambda x: x.add_(x.t().clone()),
    "flat": lambda x: x.view(-1)[1:].add_(x.view(-1)[:-1].clone()),
    "expanded": lambda x: x.expand(3, 4, 4).clone().add_(1),
    "expanded column": lambda x: x[:, :1].expand(4, 4).clone().mul_(0.5),
}
APART: dict[str, Any] = {
    "columns": lambda x: x[:, 0].add_(x[:, 1]),
    "rows": lambda x: x[0].add_(x[1]),
    "transposed": lambda x: x[:2, 2:].add_(x[2:, :2].t()),
    "the same": lambda x: x[:, 1:].mul_(x[:, 1:]),
    "itself": lambda x: x.add_(x).mul_(0.5),
    "list": lambda x: torch._foreach_mul_([x[:, 0], x[:, 1]], [x[:, 2], x[:, 3]]),
    "out": lambda x: torch.mul(x[:, 1:], 2, out=x[:, 1:]),
    "a number": lambda x: x.masked_fill_(x > 0.5, x[0, 0]),
    "expanded": lambda x: x[:, :1].add_(x[:, 1:2].expand(4, 1)),
}


@on_ranks(3)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_write_to_memory_that_is_read_is_refused_on_all_ranks(name: str, placement: Any) -> None:
    """Of four rows the last rank has none, and torch's own check would let it pass there."""
    mesh = init_device_mesh(device_type(), (3,))
    x = distribute_tensor(torch.rand(4, 4, device=device_type()), mesh, [placement])
    before = x.full_tensor()
    with pytest.raises(RuntimeError, match=r"unsupported operation: .*clone\(\) "):
        OVERLAPPING[name](x)
    assert torch.equal(x.full_tensor(), before)
    if name in CLONED:
        assert torch.equal(CLONED[name](x).full_tensor(), CLONED[name](before.clone()))


@on_ranks(2)
def test_what_one_element_of_a_list_writes_and_another_reads() -> None:
    (whole,), (x,) = operands(Shard(0))
    for lists in (([x[0], x[1]], [x[1], x[0]]), ([x[0], x[0]], [x[1], x[2]])):
        with pytest.raises(RuntimeError, match=r"writes to element 0, .* that overlaps element 1 of its lists"):
            torch._foreach_add_(*lists)
    torch._foreach_add_([x[0], x[1]], [x[2], x[3]])
    torch._foreach_add_([whole[0], whole[1]], [whole[2], whole[3]])
    same(x, whole)


@on_ranks(3)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", APART)
def test_a_write_beside_what_is_read_is_done(name: str, placement: Any) -> None:
    whole = torch.rand(4, 4, dtype=torch.float64)
    x = distribute_tensor(whole.to(device_type()), init_device_mesh(device_type(), (3,)), [placement])
    same(x, whole)
    APART[name](x)
    APART[name](whole)
    same(x, whole)


@on_ranks(2)
def test_one_of_several_views_is_detached_after_another_was_written() -> None:
    (whole,), (x,) = operands(Shard(0))
    for value in (whole, x):
        value.requires_grad_()
    for _ in range(2):
        (first, second), (a, b) = ((value * 1).split([1, 2], 1) for value in (whole, x))
        second.detach().mul_(0.5)
        b.detach().mul_(0.5)
        same(a.detach(), first.detach())
        same(b.detach(), second.detach())
