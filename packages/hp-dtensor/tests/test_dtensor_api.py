"""What a DTensor offers beside operations: making, reading, moving, saving it."""

from __future__ import annotations

import copy
import io
import pickle
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
    StridedShard,
    distribute_tensor,
    empty,
    full,
    implicit_replication,
    init_device_mesh,
    ones,
    rand,
    zeros,
)
from hp_dtensor.torch.dtensor import local_view
from hp_platform import count_collectives, get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

R, P = Replicate(), Partial()


def _mesh(ranks: int = 2) -> DeviceMesh:
    return init_device_mesh(device_type(), (ranks,), ("x",))


def _arange(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device_type()).reshape(shape)


def _dt(*shape: int, placement: Any = None, ranks: int = 2) -> DTensor:
    return distribute_tensor(_arange(*shape), _mesh(ranks), [placement or Shard(0)])


# ---- making one ----
@on_ranks(2)
def test_from_local(ranks: int) -> None:
    mesh = _mesh()
    me = mesh.get_local_rank()
    local = torch.full((2, 3), float(me), dtype=torch.float64, device=device_type(), requires_grad=True)
    x = DTensor.from_local(local, mesh, [Shard(0)])
    assert type(x) is DTensor and x.shape == (4, 3) and x.local_shape == (2, 3) and not x.is_leaf
    assert x.placements == (Shard(0),) and x.device_mesh == mesh
    assert DTensor.from_local(local, mesh).placements == (R,), "replicated by default"
    assert DTensor.from_local(local, mesh, [Shard(-1)]).shape == (2, 6)
    assert DTensor.from_local(local, mesh, [P]).full_tensor().eq(1).all()
    with mesh:
        assert DTensor.from_local(local, None, [Shard(1)]).shape == (2, 6)
    (x * 2).sum().backward()
    assert local.grad.eq(2).all() and type(local.grad) is torch.Tensor


@on_ranks(3)
def test_from_local_of_uneven_parts() -> None:
    mesh = _mesh(3)
    me = mesh.get_local_rank()
    whole = _arange(5, 2)
    mine = whole[2 * me : 2 * me + 2].clone()
    x = DTensor.from_local(mine, mesh, [Shard(0)], shape=(5, 2), stride=(2, 1))
    assert torch.equal(x.full_tensor(), whole)
    ragged = RaggedShard((0, 1), (7, 0, 3))
    piece = whole.flatten()[[slice(0, 7), slice(7, 7), slice(7, 10)][me]].clone()
    x = DTensor.from_local(piece, mesh, [ragged], shape=(5, 2))
    assert torch.equal(x.full_tensor(), whole) and x.shape == (5, 2)
    with pytest.raises(ValueError, match=r"from_local: a RaggedShard needs shape="):
        DTensor.from_local(piece, mesh, [ragged])
    with pytest.raises(
        ValueError, match=rf"of global shape \(7, 2\) placed \(Shard\(0\),\) .* rank {me} at \({me},\), got"
    ):
        DTensor.from_local(whole[:2] if me == 2 else whole[:1], mesh, [Shard(0)], shape=(7, 2))


@on_ranks(2)
def test_from_local_checks() -> None:
    mesh = _mesh()
    me = mesh.get_local_rank()
    with pytest.raises(ValueError, match="values differ between ranks along axis 0, where the placement is Replicate"):
        DTensor.from_local(_arange(2) + me, mesh, [R], run_check=True)
    with pytest.raises(ValueError, match="ranks along axis 0 disagree on the global shape"):
        DTensor.from_local(_arange(2, 2 + me), mesh, [Shard(0)], run_check=True)
    DTensor.from_local(_arange(2) + me, mesh, [Shard(0)], run_check=True)
    with pytest.raises(TypeError, match="from_local takes a plain tensor, got a DTensor"):
        DTensor.from_local(_dt(4), mesh, [Shard(0)])
    assert _dt(4).redistribute(mesh, [R]).placements == (R,)
    with pytest.raises(ValueError, match="2 placements .* for a mesh of 1 axes"):
        DTensor.from_local(_arange(2), mesh, [R, R])
    DTensor.from_local(_arange(2), mesh, [R])
    with pytest.raises(ValueError, match=r"Shard\(1\) of a tensor with 1 dims"):
        DTensor.from_local(_arange(2), mesh, [Shard(1)])


@on_ranks(2, 3)
def test_distribute_tensor(ranks: int) -> None:
    mesh = _mesh(ranks)
    me = mesh.get_local_rank()
    whole = _arange(5, 4) + 100 * me
    for placement in (
        R,
        Shard(0),
        Shard(1),
        Shard(-1),
        StridedShard(1, 2),
        RaggedShard((0, 1), (1,) * (ranks - 1) + (5 - ranks,)),
    ):
        for source in range(ranks):
            x = distribute_tensor(whole, mesh, [placement], src_data_rank=source)
            assert x.is_leaf and torch.equal(x.full_tensor(), _arange(5, 4) + 100 * source)
    with count_collectives() as counted:
        x = distribute_tensor(whole, mesh, [R], src_data_rank=None)
    assert not sum(counted.values()) and torch.equal(x.to_local(), whole), "each rank its own"
    whole.zero_()
    assert x.to_local().sum() > 0, "no memory is shared"
    assert distribute_tensor(_arange(4).requires_grad_(), mesh, [R]).requires_grad
    meta = distribute_tensor(torch.empty(5, 4, device="meta", requires_grad=True), mesh, [Shard(0)])
    assert meta.is_meta and meta.shape == (5, 4) and meta.requires_grad
    assert distribute_tensor(_dt(4, ranks=ranks), mesh, [R]).placements == (R,)
    with pytest.raises(TypeError, match=r"placements must be a sequence .* write \[Shard\(0\)\]"):
        distribute_tensor(whole, mesh, Shard(0))
    partial = distribute_tensor(_arange(4), mesh, [P])
    assert partial.is_partial() and torch.equal(partial.full_tensor(), _arange(4))


@on_ranks(2)
def test_factories() -> None:
    mesh = _mesh()
    for made, value in (
        (zeros(3, 4, device_mesh=mesh, placements=[Shard(0)]), 0),
        (ones((3, 4), device_mesh=mesh, placements=[Shard(1)]), 1),
        (full((3, 4), 2.5, device_mesh=mesh), 2.5),
    ):
        assert type(made) is DTensor and made.shape == (3, 4) and made.full_tensor().eq(value).all()
        assert made.dtype == torch.get_default_dtype() and not made.requires_grad
    assert full((3, 4), 2.5, device_mesh=mesh).placements == (R,)
    made = empty(5, dtype=torch.int32, device_mesh=mesh, placements=[Shard(0)])
    assert made.dtype == torch.int32 and made.local_shape == ((3,), (2,))[mesh.get_local_rank()]
    with mesh:
        assert zeros(4, requires_grad=True, placements=[Shard(0)]).requires_grad
    assert ones(device_mesh=mesh).shape == ()
    with pytest.raises(ValueError, match=r"zeros: placements \(Partial\(\),\) hold a Partial"):
        zeros(4, device_mesh=mesh, placements=[P])
    assert zeros(4, device_mesh=mesh, placements=[R]).full_tensor().eq(0).all()
    assert (
        rand(4, device_mesh=mesh, placements=[RaggedShard((0,), (3, 1))]).local_shape
        == ((3,), (1,))[mesh.get_local_rank()]
    )


@on_ranks(2)
def test_new_ones() -> None:
    x = _dt(4, 3)
    for made in (x.new_zeros(2, 5), x.new_zeros((2, 5)), x.new_full((2, 5), 0.0)):
        assert type(made) is DTensor and made.placements == (R,) and made.shape == (2, 5) and made.dtype == x.dtype
    like = torch.zeros_like(x)
    assert like.placements == (Shard(0),) and like.shape == (4, 3)
    assert torch.ones_like(_dt(4, 3, placement=P)).full_tensor().eq(1).all()
    assert torch.empty_like(x, dtype=torch.int8).dtype == torch.int8


# ---- layouts ----
@on_ranks(2, 3)
def test_redistribute(ranks: int) -> None:
    mesh = _mesh(ranks)
    whole = _arange(5, 6)
    every = [R, Shard(0), Shard(1), StridedShard(1, 2), P, RaggedShard((0, 1), (2, 1) if ranks == 2 else (2, 0, 3))]
    for source in every:
        x = distribute_tensor(whole, mesh, [source])
        for target in every:
            y = x.redistribute(mesh, [target])
            assert y.placements == (target,) and torch.equal(y.full_tensor(), whole), (source, target)
            assert y is not x and x.placements == (source,)
    assert x.redistribute(placements=[Shard(-1)], async_op=True).placements == (Shard(1),)
    with pytest.raises(ValueError, match="redistribute: pass the target"):
        x.redistribute()
    assert torch.equal(x.redistribute(placements=[Replicate()]).to_local(), whole)
    other = init_device_mesh(device_type(), (ranks, 1))
    assert x.redistribute(other, [R, R]).device_mesh == other
    assert _dt(4, placement=P, ranks=ranks).reduce_partial().placements == (R,)


@on_ranks(2)
def test_to_local() -> None:
    x = _dt(5, 2).requires_grad_()
    local = x.to_local()
    assert type(local) is torch.Tensor and local.shape == x.local_shape
    (local * 3).sum().backward()
    assert x.grad.placements == (Shard(0),) and x.grad.full_tensor().eq(3).all()
    x = _dt(5, 2, placement=R).requires_grad_()
    (x.to_local(grad_placements=[P]) * (x.device_mesh.get_local_rank() + 1)).sum().backward()
    assert x.grad.placements == (R,) and x.grad.full_tensor().eq(3).all(), "1 + 2"
    with pytest.raises(
        ValueError,
        match=r"grad_placements\[0\] is Shard\(0\) for a tensor placed Replicate\(\); it may be",
    ):
        x.to_local(grad_placements=[Shard(0)])
    with pytest.raises(ValueError, match="for a mesh of 1 axes"):
        x.to_local(grad_placements=[R, R])


@on_ranks(2)
def test_full_tensor() -> None:
    x = _dt(5, 2).requires_grad_()
    whole = x.full_tensor()
    assert type(whole) is torch.Tensor and torch.equal(whole, _arange(5, 2))
    (whole**2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * _arange(5, 2))
    x.grad = None
    me = x.device_mesh.get_local_rank()
    (x.full_tensor(grad_placements=[P]) * (me + 1)).sum().backward()
    assert x.grad.full_tensor().eq(3).all()


@on_ranks(2)
def test_metadata() -> None:
    x = _dt(5, 2)
    assert x.shape == x.size() == (5, 2) and x.size(0) == x.size(-2) == len(x) == 5
    assert x.ndim == x.dim() == x.ndimension() == 2 and x.numel() == x.nelement() == 10
    assert x.stride() == (2, 1) and x.stride(0) == 2 and x.t().stride() == (1, 2)
    assert (
        x.dtype == torch.float64 and x.device.type == device_type() and x.is_floating_point() and x.element_size() == 8
    )
    assert x.is_leaf and not x.requires_grad and x.grad_fn is None and not x.is_meta and x.is_contiguous()
    assert isinstance(x, torch.Tensor) and hash(x) == hash(x) and x in [x]
    assert not x.is_partial() and _dt(4, placement=P).is_partial()
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(x.sum())


@on_ranks(2)
def test_values_are_read_whole() -> None:
    x = _dt(3)
    total = x.sum()
    assert total.is_partial()
    assert total.item() == float(total) == int(total) == 3 and bool(total) and f"{total:.1f}" == "3.0"
    assert x.tolist() == [0.0, 1.0, 2.0] and [float(v) for v in x] == [0.0, 1.0, 2.0]
    assert 2.0 in x and 5.0 not in x and [10, 20, 30, 40][total.long()] == 40
    if device_type() == "cpu":  # elsewhere the groups don't gather what is on the host
        assert x.detach().cpu().numpy().tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
        bool(x)
    with pytest.raises(RuntimeError, match="a Tensor with 3 elements cannot be converted to Scalar"):
        x.item()
    if total > 2:
        total = total - 3
    assert not total


@on_ranks(2)
def test_text() -> None:
    x = _dt(3, 2)
    me = x.device_mesh.get_local_rank()
    assert repr(x).startswith("DTensor(shape=(3, 2), placements=(Shard(0),), mesh=DeviceMesh(")
    assert ("local=tensor([[0., 1.]" if me == 0 else "local=tensor([[4., 5.]]") in repr(x)
    assert str(x) == f"{x}" == repr(x) and repr(nn.Parameter(x)).startswith("Parameter(DTensor)(shape=(3, 2)")
    print(x)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.2f}"
    total = x.sum()
    assert f"{total:.1f}" == "15.0" and f"{total}" == repr(total)  # a number would be a collective in a text
    assert f"{total.full_tensor()}" == f"{total.redistribute(placements=[Replicate()])}" == "15.0"


# ---- copies ----
@on_ranks(2)
def test_copies_and_pickles() -> None:
    x = nn.Parameter(_dt(5, 2))
    x.tag = "kept"
    (x * 2).sum().backward()
    for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(again) is DTensor and isinstance(again, nn.Parameter) and again.requires_grad and again.is_leaf
        assert again._spec is x._spec and again.tag == "kept" and torch.equal(local_view(again), local_view(x))
        assert local_view(again).data_ptr() != local_view(x).data_ptr()
    assert torch.equal(local_view(copy.deepcopy(x).grad), local_view(x.grad))
    row = x.detach()[0]  # gathered
    assert torch.equal(pickle.loads(pickle.dumps(row)).to_local(), copy.deepcopy(row).to_local())
    shared = copy.deepcopy([x, x])
    assert shared[0] is shared[1]
    with pytest.raises(RuntimeError, match="only DTensors that are leaves"):
        copy.deepcopy(x * 2)
    assert torch.equal(copy.deepcopy((x * 2).detach()).full_tensor(), (x * 2).full_tensor())


@on_ranks(2)
def test_saved_and_loaded() -> None:
    x = nn.Parameter(_dt(5, 2))
    buffer = io.BytesIO()
    torch.save({"x": x, "plain": torch.ones(2)}, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([]):
        loaded = torch.load(buffer, weights_only=False)
    assert loaded["x"]._spec is x._spec and torch.equal(loaded["x"].full_tensor(), x.full_tensor())


# ---- operands that don't go together ----
@on_ranks(2)
def test_plain_tensors_do_not_mix() -> None:
    x, plain = _dt(4, 3), _arange(4, 3)
    message = (
        r"a plain tensor of shape \(4, 3\) meets a DTensor of shape \(4, 3\) placed \(Shard\(0\),\)\. Distribute it"
    )
    for call in (
        lambda: x + plain,
        lambda: plain * x,
        lambda: torch.cat([x, plain]),
        lambda: torch.where(x > 0, plain, x),
        lambda: torch.nn.functional.linear(x, plain),
        lambda: torch.allclose(x, plain),
        lambda: x.copy_(plain),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"meets a DTensor .*implicit_replication"):
        x[torch.tensor([0, 1], device=device_type())]
    placed = distribute_tensor(plain, x.device_mesh, [R])  # "Distribute it"
    assert torch.equal((x + placed).full_tensor(), 2 * plain)
    with implicit_replication():
        assert torch.equal((x + plain).full_tensor(), 2 * plain)
        assert torch.equal(x[torch.tensor([0, 1], device=device_type())].full_tensor(), plain[:2])
    assert torch.equal((x + torch.tensor(2.0)).full_tensor(), plain + 2), "0-d tensors are numbers"


@on_ranks(2)
@pytest.mark.framework("torch")
def test_sizes_that_are_tensors_are_numbers() -> None:
    x, two, three = _dt(6, 4), torch.tensor(2), torch.div(torch.tensor(9), 3, rounding_mode="trunc")
    assert torch.equal(x.view(two, three, 4).full_tensor(), _arange(6, 4).view(2, 3, 4))
    assert torch.equal(x.reshape(three, -1).full_tensor(), _arange(6, 4).reshape(3, -1))
    assert torch.equal(x[:1].expand(three, 4).full_tensor(), _arange(6, 4)[:1].expand(3, 4))
    assert torch.equal(x.narrow(1, two - 1, two).full_tensor(), _arange(6, 4).narrow(1, 1, 2))


@on_ranks(2)
def test_implicit_replication() -> None:
    x, plain = _dt(4, 3).requires_grad_(), _arange(4, 3).requires_grad_()
    with implicit_replication():
        y = (x * plain + plain[0]).sum()
        assert torch.equal(x[torch.tensor([2, 0], device=device_type())].full_tensor(), _arange(4, 3)[[2, 0]])
        assert torch.equal(plain.detach().clone().add_(x), 2 * _arange(4, 3)), "written into, a plain tensor stays one"
    y.backward()
    expected = _arange(4, 3)
    expected[0] += 4
    assert torch.equal(x.grad.full_tensor(), _arange(4, 3)) and torch.equal(plain.grad, expected)
    with pytest.raises(ValueError, match="a plain tensor"):
        x + plain


@on_ranks(2)
def test_operands_on_different_meshes() -> None:
    x = _dt(4)
    y = distribute_tensor(_arange(4), init_device_mesh(device_type(), (2,), ("y",)), [Shard(0)])
    with pytest.raises(
        ValueError, match="add: operands are on different meshes, DeviceMesh.* and DeviceMesh.*; redistribute"
    ):
        x + y
    assert torch.equal((x + y.redistribute(x.device_mesh, [Shard(0)])).full_tensor(), 2 * _arange(4))


@on_ranks(2)
def test_no_rule() -> None:
    x = _dt(4, 4)
    with pytest.raises(
        NotImplementedError,
        match=r"no sharding rule for .*fft.* \(DTensors: \(4, 4\) \(Shard\(0\),\)\)\. Give it one",
    ):
        torch.fft.fft(x)
    assert torch.equal(torch.fft.fft(x.full_tensor()), torch.fft.fft(_arange(4, 4)))


@on_ranks(2)
def test_writing_in_place_never_moves() -> None:
    x = _dt(4, 3)
    before = x.full_tensor().clone()
    with pytest.raises(RuntimeError, match="would have to be redistributed first"):
        _dt(4, 3, placement=P).add_(x)
    with pytest.raises(RuntimeError, match="would have to be redistributed first"):
        _dt(4, 3, placement=P).relu_()
    assert torch.equal(_dt(4, 3, placement=P).relu().full_tensor(), _arange(4, 3))
    row = distribute_tensor(_arange(3), x.device_mesh, [Shard(0)])
    assert x.add_(row) is x and torch.equal(x.full_tensor(), before + _arange(3))
    replicated = _dt(4, 3, placement=R)
    replicated.add_(x)
    assert replicated.placements == (R,) and torch.equal(replicated.full_tensor(), _arange(4, 3) + before + _arange(3))
    replicated[1] = 7.0
    assert replicated.full_tensor()[1].eq(7).all()
    x[1] = 7.0
    assert x.placements == (Shard(0),) and x.full_tensor()[1].eq(7).all()


@on_ranks(2)
def test_with_interception_off_it_is_its_local_tensor() -> None:
    x = _dt(5, 2)
    with torch._C.DisableTorchFunctionSubclass():
        assert x.shape == x.local_shape and len(x) == x.local_shape[0] and x.numel() == 2 * x.local_shape[0]
        assert type(x * 2) is torch.Tensor
    assert get_platform().groups.size() == 2


@on_ranks(2)
def test_layout_is_the_framework_s_and_sharding_is_ours() -> None:
    mesh = _mesh()
    x = distribute_tensor(_arange(4, 6), mesh, [Shard(0)])
    assert x.layout is torch.strided
    assert x.sharding == (mesh, (Shard(0),))
    torch.testing.assert_close(x.full_tensor(), _arange(4, 6))
    torch.testing.assert_close(x, x + 0)
    assert torch.masked.sum(x, 1).full_tensor().equal(_arange(4, 6).sum(1))
    assert torch.empty_like(x, layout=x.layout).placements == (Shard(0),)
