"""DTensors that go from one mesh to another."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transfers import check, count_up, mesh_of

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    init_device_mesh,
)
from hp_dtensor.layout.sharding import take
from hp_dtensor.redistribution import plan_transfer
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

R, P = Replicate(), Partial()

MESHES = [
    [[0, 1], [2, 3]],
    [0, 1],
    [2, 3],
    [0, 1, 2],
    [1, 3],
    [0, 1, 2, 3],
    [[0, 2], [1, 3]],
    [3],
    [[[0], [1]], [[2], [3]]],
]


@on_ranks(4)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_mesh_to_any_other(seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    meshes = [mesh_of(ranks) for ranks in MESHES]
    for source in meshes:
        for target in meshes:
            shape = tuple(rng.choice([0, 1, 3, 5, 6, 8]) for _ in range(rng.choice([1, 2, 2, 3])))
            have, wanted = (
                [rng.choice([R, *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)] for mesh in (source, target)
            )
            whole = count_up(*shape)
            x = distribute_tensor(whole, source, have, src_data_rank=None)
            check(x.redistribute(target, wanted), whole, target, wanted)


@on_ranks(4)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    whole = count_up(5, 3, dtype=torch.float32).to(dtype) if dtype.itemsize == 1 else count_up(5, 3, dtype=dtype)
    source, target = mesh_of([0, 1, 2]), mesh_of([1, 3])
    x = distribute_tensor(whole, source, [Shard(0)], src_data_rank=None)
    y = x.redistribute(target, [Shard(1)])
    assert y.dtype is dtype
    if target.get_coordinate() is not None:
        part = take(np.arange(15).reshape(5, 3), [Shard(1)], (2,), target.get_coordinate())
        expected = whole.reshape(-1).view(torch.int8 if dtype.itemsize == 1 else dtype)[
            torch.from_numpy(part).to(whole.device)
        ]
        assert torch.equal(y.to_local().view(expected.dtype), expected)


@on_ranks(4)
def test_shards_that_are_not_contiguous() -> None:
    whole = count_up(4, 6, 100)
    square, line, row = mesh_of([[0, 1], [2, 3]]), mesh_of([0, 1, 2, 3]), mesh_of([1, 3])
    ragged = RaggedShard((1, 2), (1, 2, 0, 3))
    cases = [
        (square, (Shard(1), StridedShard(1, 3)), row, (Shard(1),)),
        (square, (RaggedShard((0, 1), (1, 2)), Shard(1)), line, (Shard(0),)),
        (line, (ragged,), square, (Shard(2), Shard(2))),
        (square, (Shard(2), RaggedShard((0, 1, 2), (1, 3))), row, (RaggedShard((0, 1), (1, 1)),)),  # a hundred pieces
    ]
    for source, have, target, wanted in cases:
        x = distribute_tensor(whole, source, have, src_data_rank=None)
        y = x.redistribute(target, wanted)
        back = y.redistribute(source, have)
        assert torch.equal(back.to_local(), x.to_local()), have
        z = y.redistribute(source, [R] * source.ndim)
        assert torch.equal(z.to_local(), whole), wanted


@on_ranks(4)
def test_partial_on_either_side() -> None:
    source, target = mesh_of([[0, 1], [2, 3]]), mesh_of([2, 3])
    local = count_up(3, 4) * (1 + source.get_local_rank(1))
    for op, total in (("sum", 3), ("max", 2), ("avg", 1.5)):
        x = DTensor.from_local(local, source, [R, Partial(op)])
        y = x.redistribute(target, [Shard(0)])
        check(y, count_up(3, 4) * total, target, [Shard(0)])
    x = distribute_tensor(count_up(3, 4), mesh_of([0]), [R], src_data_rank=None)
    for op in ("sum", "product", "avg", "min"):
        y = x.redistribute(target, [Partial(op)])
        back = y.redistribute(placements=[R])
        check(back, count_up(3, 4), target, [R])
    held = x.redistribute(target, [P]).to_local()
    assert held.shape == ((3, 4) if source.get_rank() > 1 else (0, 0)) and (source.get_rank() != 3 or not held.any())


@on_ranks(4)
def test_a_layout_names_the_target() -> None:
    x = distribute_tensor(count_up(4, 2), init_device_mesh(device_type(), (4,)), [Shard(0)])
    y = x.redistribute(Layout((2, 2), ("dp", "tp"))("dp", "tp"))
    assert y.placements == (Shard(0), Shard(1)) and y.to_local().shape == (2, 1)
    check(y, count_up(4, 2), y.device_mesh, y.placements)


@on_ranks(4)
def test_other_names_of_the_same_ranks_change_nothing_else() -> None:
    named, plain = mesh_of([[0, 1], [2, 3]], ("dp", "tp")), mesh_of([[0, 1], [2, 3]])
    x = distribute_tensor(count_up(4, 2), named, [Shard(0), R]).requires_grad_()
    with count_collectives() as counts:
        y = x.redistribute(plain, [Shard(0), R])
    assert not counts and y.device_mesh == plain
    check(x.redistribute(plain, [Shard(1), Shard(1)]).detach(), count_up(4, 2), plain, [Shard(1), Shard(1)])
    (y * y).sum().backward()
    assert torch.equal(x.grad.to_local(), 2 * x.detach().to_local())


# ---- what is sent ----
@on_ranks(4)
def test_each_byte_is_sent_once_and_none_that_is_there() -> None:
    square, row, others = mesh_of([[0, 1], [2, 3]]), mesh_of([0, 1]), mesh_of([2, 3])
    x = distribute_tensor(count_up(8, 6), square, [R, Shard(0)])
    for target, wanted in ((row, [Shard(0)]), (mesh_of([0, 1, 2, 3]), [Shard(0)])):
        with count_collectives() as counts:
            x.redistribute(target, wanted)
        way = plan_transfer(x.sharding, Layout.of(target, wanted), (8, 6))
        assert dict(counts) == ({"all_to_all": 1} if way.sends else {})
        mine = sum(m.elements for m in way.moves_from(square.get_rank()) if m.destination != square.get_rank())
        assert counts.bytes == 8 * mine
    assert not plan_transfer(x.sharding, Layout.of(row, [Shard(0)]), (8, 6)).sends
    x = distribute_tensor(count_up(8, 6), row, [Shard(0)], src_data_rank=None)
    with count_collectives() as counts:
        x.redistribute(others, [Shard(1)])
    assert counts.bytes == (8 * 24 if row.get_coordinate() is not None else 0)


@on_ranks(4)
def test_ranks_outside_both_meshes_take_no_part() -> None:
    source, target = mesh_of([0, 1]), mesh_of([1, 2])
    x = distribute_tensor(count_up(5, 3), source, [Shard(0)], src_data_rank=None)
    with count_collectives() as counts:
        y = x.redistribute(target, [Shard(0)])
    assert dict(counts) == ({} if source.get_rank() == 3 else {"all_to_all": 1})
    if source.get_rank() == 3:
        return  # nor need it call
    check(y.redistribute(source, [R]), count_up(5, 3), source, [R])


# ---- ranks outside a mesh ----
@on_ranks(2)
def test_a_rank_outside_a_mesh_holds_nothing() -> None:
    mesh = mesh_of([0])
    outside = mesh.get_coordinate() is None
    given = torch.zeros(0, 0, dtype=torch.int32, device=device_type()) if outside else count_up(3, 2, dtype=torch.int32)
    x = DTensor.from_local(given, mesh, [R], shape=(3, 2))
    assert x.shape == (3, 2) and x.to_local().shape == ((0, 0) if outside else (3, 2)) and x.dtype is torch.int32
    x = DTensor.from_local(count_up(3, 2).requires_grad_(), mesh, [Shard(0)])
    assert x.shape == (3, 2) and x.requires_grad and x.to_local().numel() == (0 if outside else 6)
    assert distribute_tensor(count_up(3, 2).requires_grad_(), mesh, [Shard(0)]).requires_grad
    scalar = DTensor.from_local(torch.tensor(2.0, device=device_type()), mesh, [R])
    assert scalar.redistribute(mesh_of([1]), [R]).to_local().item() == (2.0 if outside else 0.0)
    if outside:
        with pytest.raises(
            ValueError, match=r"rank 1 is not in .* the global shape cannot be inferred .*; pass shape="
        ):
            DTensor.from_local(torch.zeros(0, 2, device=device_type()), mesh, [R])
        assert DTensor.from_local(torch.zeros(0, 2, device=device_type()), mesh, [R], shape=(3, 2)).shape == (3, 2)


# ---- gradients ----
@on_ranks(4)
@pytest.mark.parametrize("have", [[Shard(0)], [R], [Shard(1)]], ids=repr)
@pytest.mark.parametrize("wanted", [[Shard(0)], [R], [Shard(1)]], ids=repr)
def test_gradients_are_those_of_one_device(have, wanted) -> None:
    source, target = mesh_of([0, 1, 2]), mesh_of([1, 3])
    whole, weight = count_up(5, 3).requires_grad_(), count_up(3, 4) / 7
    (whole.sin() @ weight).square().sum().backward()
    x = distribute_tensor(whole.detach(), source, have, src_data_rank=None).requires_grad_()
    w = distribute_tensor(weight, target, [R], src_data_rank=None)
    y = x.sin().redistribute(target, wanted)
    loss = (y @ w).square().sum()
    loss.backward()
    assert x.grad.placements == tuple(have)
    if source.get_coordinate() is not None:
        part = take(whole.grad.cpu().numpy(), have, source.shape, source.get_coordinate())
        np.testing.assert_allclose(x.grad.to_local().cpu().numpy(), part, rtol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize(("op", "factor"), [("sum", 1.0), ("avg", 0.5)])
def test_gradients_of_partial_tensors(op: str, factor: float) -> None:
    square, line = mesh_of([[0, 1], [2, 3]]), mesh_of([0, 1, 2, 3])
    local = count_up(4, 2).requires_grad_()
    weight = distribute_tensor(count_up(4, 2), line, [Shard(0)])
    x = DTensor.from_local(local, square, [R, Partial(op)])
    (x.redistribute(line, [Shard(0)]) * weight).sum().backward()
    np.testing.assert_allclose(local.grad.cpu().numpy(), count_up(4, 2).cpu().numpy() * factor)
    y = distribute_tensor(count_up(4, 2), line, [Shard(0)]).requires_grad_()
    z = y.redistribute(square, [Shard(0), Partial(op)])
    (z.redistribute(placements=[R, R]) * distribute_tensor(count_up(4, 2), square, [R, R])).sum().backward()
    np.testing.assert_allclose(y.grad.to_local().cpu().numpy(), weight.to_local().cpu().numpy())


@on_ranks(2)
def test_a_second_derivative() -> None:
    source, target = mesh_of([0, 1]), mesh_of([[0], [1]])
    x = distribute_tensor(count_up(4), source, [Shard(0)]).requires_grad_()
    y = (x.redistribute(target, [R, R]) ** 3).sum()
    (grad,) = torch.autograd.grad(y, [x], create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), [x])
    assert torch.equal(second.to_local(), 6 * x.detach().to_local())


@on_ranks(2)
def test_a_second_derivative_of_a_partial_value() -> None:
    source, target = mesh_of([0, 1]), mesh_of([[0], [1]])
    whole, weight = count_up(3, 4).double(), count_up(3, 4).double().flip(0)

    def second(x, w, move):
        y = (move((x * w).sum(1)) ** 3).sum()
        (grad,) = torch.autograd.grad(y, [x], create_graph=True)
        return torch.autograd.grad((grad * grad).sum(), [x, w])

    expected = second(whole.requires_grad_(), weight.requires_grad_(), lambda y: y)
    x, w = (distribute_tensor(each.detach(), source, [Shard(1)]).requires_grad_() for each in (whole, weight))
    made = second(x, w, lambda y: y.redistribute(target, [R, R]))
    for got, want in zip(made, expected):
        torch.testing.assert_close(got.full_tensor(), want)


@on_ranks(2)
def test_without_recording_nothing_is_recorded() -> None:
    x = distribute_tensor(count_up(4), mesh_of([0, 1]), [Shard(0)]).requires_grad_()
    with torch.no_grad():
        y = x.redistribute(mesh_of([[0], [1]]), [R, R])
    assert not y.requires_grad and y.to_local().data_ptr() != x.to_local().data_ptr()
    y.add_(1)
    assert torch.equal(x.to_local(), distribute_tensor(count_up(4), mesh_of([0, 1]), [Shard(0)]).to_local())


# ---- errors ----
@on_ranks(4)
def test_what_does_not_fit_is_an_error_on_all_ranks_before_anything_is_sent() -> None:
    square, row = mesh_of([[0, 1], [2, 3]]), mesh_of([0, 1])
    x = distribute_tensor(count_up(6, 4), square, [Shard(0), R])
    uneven = distribute_tensor(count_up(3, 4), square, [Shard(0), R])
    wrong = [
        ([Shard(2)], r"the dim must be in \[-2, 1\]"),
        ([R, R], "2 placements"),
        ([StridedShard(1, 3)], "split_factor 3 must divide"),
        ([RaggedShard((0, 1), (3, 4))], r"multiple of sum\(units\) = 7"),
    ]
    with count_collectives() as counts:
        for placements, text in wrong:
            with pytest.raises(ValueError, match=text):
                x.redistribute(row, placements)
        with pytest.raises(ValueError, match="meshes of one kind of device are needed"):
            x.redistribute(DeviceMesh("meta", [0, 1], _init_groups=False), [R])
        # units that fit some ranks only: the others have to raise as well
        with pytest.raises(ValueError, match="depending on the rank"):
            uneven.redistribute(mesh_of([[0, 2], [1, 3]]), [Shard(0), RaggedShard((0, 1), (1, 1))])
    assert not counts, "nothing was sent"


@on_ranks(2)
def test_a_local_part_of_another_shape_is_an_error() -> None:
    x = distribute_tensor(count_up(6), mesh_of([0, 1]), [Shard(0)])
    from hp_dtensor.torch.moves.transfer import execute_transfer

    target = x.redistribute(mesh_of([[0], [1]]), [R, R])._spec
    with pytest.raises(ValueError, match=r"the local tensor has shape \(4,\).*\(3,\)"):
        execute_transfer(torch.zeros(4, device=device_type()), x._spec, target)
