"""What a DTensor does as a tensor: conversions, parameters, optimizers, pickles, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_dtensor import (
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    full,
    implicit_replication,
    init_device_mesh,
    ones,
    zeros,
)
from hp_dtensor.spec import TensorSpec
from hp_dtensor.torch.dtensor import local_view, wrap
from hp_platform.testing import device_type, on_ranks

R = Replicate()


def _mesh():
    return init_device_mesh(device_type(), (torch.distributed.get_world_size(),), ("tp",))


def _arange(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64, device=device_type()).view(shape)


def _ragged(tensor, mesh):
    """All but the last rank hold one element, the last the rest."""
    ranks, count = mesh.size(), tensor.numel()
    units = (*(1,) * (ranks - 1), count - ranks + 1)
    return distribute_tensor(tensor, mesh, [RaggedShard(tuple(range(tensor.dim())), units)])


@on_ranks(1, 2, 3)
def test_from_local_and_back():
    mesh, rank = _mesh(), torch.distributed.get_rank()
    local = _arange(2, 3) + rank
    made = DTensor.from_local(local, mesh, [Shard(0)])
    assert made.shape == (2 * mesh.size(), 3)
    assert made.local_shape == (2, 3)
    assert torch.equal(made.to_local(), local)
    assert type(made.to_local()) is torch.Tensor
    assert DTensor.from_local(local, Layout((mesh.size(),), ("tp",))("tp", "None")).placements == (Shard(0),)
    uneven = (
        DTensor.from_local(_arange(2 if rank == 0 else 1, 3)[: 2 if rank == 0 else 1], mesh, [Shard(0)], shape=(3, 3))
        if mesh.size() == 2
        else None
    )
    assert uneven is None or uneven.shape == (3, 3)


@on_ranks(2)
def test_from_local_refuses_what_does_not_fit():
    mesh = _mesh()
    with pytest.raises(ValueError, match=r"global shape \(5, 3\).*has \([23], 3\) on rank [01].*got \(4, 3\)"):
        DTensor.from_local(_arange(4, 3), mesh, [Shard(0)], shape=(5, 3))
    with pytest.raises(ValueError, match=r"Shard\(2\) of a tensor with 2 dims"):
        DTensor.from_local(_arange(4, 3), mesh, [Shard(2)])
    with pytest.raises(ValueError, match="2 placements .* for a mesh of 1 axes"):
        DTensor.from_local(_arange(4, 3), mesh, [Shard(0), R])
    with pytest.raises(TypeError, match="placements must be a sequence"):
        distribute_tensor(_arange(4, 3), mesh, Shard(0))
    with pytest.raises(ValueError, match="values differ between ranks along axis 0"):
        DTensor.from_local(_arange(3) + torch.distributed.get_rank(), mesh, [R], run_check=True)


@on_ranks(2, 3)
def test_redistribute_and_full_tensor():
    mesh, x = _mesh(), _arange(5, 4)
    given = distribute_tensor(x, mesh, [Shard(0)])
    for placement in (Shard(1), R, Shard(0), Partial()):
        moved = given.redistribute(mesh, [placement])
        assert moved.placements == (placement,)
        assert torch.equal(moved.full_tensor(), x)
    layout = Layout((mesh.size(),), ("tp",))("None", "tp")
    assert given.redistribute(layout).layout == layout
    partial = DTensor.from_local(x, mesh, [Partial()])
    assert partial.is_partial() and not partial.reduce_partial().is_partial()
    assert torch.equal(partial.full_tensor(), x * mesh.size())


@on_ranks(2)
def test_distribute_tensor_takes_the_source_ranks_values():
    mesh, rank = _mesh(), torch.distributed.get_rank()
    x = _arange(4) + 100 * rank
    assert torch.equal(distribute_tensor(x, mesh, [R]).to_local(), _arange(4))
    assert torch.equal(distribute_tensor(x, mesh, [R], src_data_rank=1).to_local(), _arange(4) + 100)
    assert torch.equal(distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).to_local(), x.chunk(2)[rank])
    made = distribute_tensor(x, mesh, [R], src_data_rank=None)
    made.zero_()
    assert torch.equal(x, _arange(4) + 100 * rank)  # no memory is shared


@on_ranks(2, 3)
def test_values_are_read_from_the_whole():
    mesh, x = _mesh(), _arange(3, 2)
    given = distribute_tensor(x, mesh, [Shard(0)])
    assert given.sum().item() == 15.0
    assert float(given.mean()) == 2.5
    assert given.tolist() == x.tolist()
    assert bool((given > -1).all()) and not bool((given > 3).all())
    assert len(given) == 3 and [row.tolist() for row in given] == x.tolist()
    assert f"{given.sum():.1f}" == "15.0"
    assert "Shard(0)" in repr(given) and "Partial()" in repr(given.sum())
    assert given.numel() == 6 and given.stride() == (2, 1) and given.size(1) == 2


@on_ranks(2)
def test_copies_and_pickles():
    mesh = _mesh()
    parameter = nn.Parameter(distribute_tensor(_arange(4, 3), mesh, [Shard(0)]))
    parameter.square().sum().backward()
    again = copy.deepcopy(parameter)
    assert isinstance(again, nn.Parameter) and isinstance(again, DTensor) and again._spec is parameter._spec
    assert torch.equal(again.grad.to_local(), parameter.grad.to_local())
    loaded = pickle.loads(pickle.dumps(parameter))
    assert isinstance(loaded, nn.Parameter) and loaded._spec is parameter._spec and loaded.requires_grad
    buffer = io.BytesIO()
    torch.save({"p": parameter}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)["p"].to_local(), parameter.to_local())
    with pytest.raises(RuntimeError, match="leaves of the graph"):
        copy.deepcopy(parameter * 2)


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("ragged", [False, True])
def test_optimizers_step_as_on_one_device(kind, ragged):
    mesh = _mesh()
    options = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
    plain = [nn.Parameter(_arange(5, 3) / 7), nn.Parameter(_arange(4) - 1)]
    placed = [
        nn.Parameter(_ragged(p.data, mesh) if ragged else distribute_tensor(p.data, mesh, [s]))
        for p, s in zip(plain, [Shard(0), R], strict=True)
    ]
    for parameters in (plain, placed):
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, **options)
        for step in range(3):
            for index, p in enumerate(parameters):
                gradient = (_arange(*p.shape) + index).cos() * (step + 1)
                p.grad = gradient if parameters is plain else distribute_tensor(gradient, mesh, p.placements)
            optimizer.step()
    for p, q in zip(plain, placed, strict=True):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_clip_grad_norm_of_torch():
    mesh = _mesh()
    gradients, placements = [_arange(5, 3), _arange(4), _arange(2, 2)], [Shard(0), R, Shard(1)]
    plain, placed = [], []
    for g, s in zip(gradients, placements, strict=True):
        plain.append(nn.Parameter(torch.zeros_like(g)))
        plain[-1].grad = g.clone()
        placed.append(nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, [s])))
        placed[-1].grad = distribute_tensor(g, mesh, [s])
    want = nn.utils.clip_grad_norm_(plain, 2.0)
    got = nn.utils.clip_grad_norm_(placed, 2.0)
    torch.testing.assert_close(got.full_tensor(), want)
    for p, q in zip(plain, placed, strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


@on_ranks(2)
def test_plain_tensors_do_not_mix_unless_told():
    mesh = _mesh()
    given = distribute_tensor(_arange(4, 3), mesh, [Shard(0)])
    with pytest.raises(
        ValueError, match=r"a plain tensor of shape \(3,\) meets a DTensor of shape \(4, 3\).*implicit_replication"
    ):
        given + _arange(3)
    assert torch.equal((given * torch.tensor(2.0)).full_tensor(), _arange(4, 3) * 2)  # scalars do
    with implicit_replication():
        assert torch.equal((given + _arange(3)).full_tensor(), _arange(4, 3) + _arange(3))
        with pytest.raises(ValueError, match="writing a DTensor of shape .* into a plain tensor"):
            _arange(4, 3).add_(given)
    with pytest.raises(ValueError, match="meets a DTensor"):
        given + _arange(3)


@on_ranks(2)
def test_different_meshes_do_not_mix():
    one, other = _mesh(), init_device_mesh(device_type(), (1, 2), ("a", "b"))
    x = distribute_tensor(_arange(4), one, [R])
    with pytest.raises(ValueError, match="operands are on different meshes.*'tp'.*'a', 'b'"):
        x + distribute_tensor(_arange(4), other, [R, R])
    with pytest.raises(ValueError, match="only the same mesh is supported"):
        x.redistribute(other, [R, R])


@on_ranks(2)
def test_an_operation_without_a_rule_says_how_to_write_one():
    given = distribute_tensor(_arange(4, 3), _mesh(), [Shard(0)])
    with pytest.raises(
        NotImplementedError, match=r"no sharding rule for .*fold.*\(4, 3\) \(Shard\(0\),\).*Add a sharding rule"
    ):
        F.fold(given, (2, 2), (1, 1))
    with pytest.raises(NotImplementedError, match="out= is not supported"):
        torch.add(given, given, out=given)


@on_ranks(2)
def test_in_place_operations_keep_the_layout_or_refuse():
    mesh = _mesh()
    given = distribute_tensor(_arange(4, 3), mesh, [Shard(0)])
    same = given
    given += distribute_tensor(_arange(4, 3), mesh, [R])
    assert given is same and given.placements == (Shard(0),)
    assert torch.equal(given.full_tensor(), 2 * _arange(4, 3))
    partial = DTensor.from_local(_arange(3), mesh, [Partial()])
    with pytest.raises(RuntimeError, match="written in place is Partial.*redistributed first"):
        partial.add_(1)
    partial.mul_(2)
    assert torch.equal(partial.full_tensor(), 4 * _arange(3))
    with pytest.raises(NotImplementedError, match=r"x\[\.\.\.\] = value on a DTensor placed"):
        given[0] = 1.0


@on_ranks(2)
def test_grad_and_data_are_checked():
    mesh = _mesh()
    parameter = nn.Parameter(distribute_tensor(_arange(4), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="grad of a DTensor must be a DTensor"):
        parameter.grad = _arange(4)
    with pytest.raises(ValueError, match="the tensor needs"):
        parameter.grad = distribute_tensor(_arange(4), mesh, [R])
    with pytest.raises(TypeError, match="data of a DTensor must be a DTensor"):
        parameter.data = _arange(4)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        (parameter * 2).backward()


@on_ranks(2)
def test_factories_and_modules():
    mesh = _mesh()
    assert torch.equal(
        zeros(3, 2, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.zeros(3, 2, device=device_type())
    )
    assert torch.equal(ones((3, 2), device_mesh=mesh).full_tensor(), torch.ones(3, 2, device=device_type()))
    with mesh:
        assert full((5,), 7.0, placements=[Shard(0)]).sum().item() == 35.0
    with pytest.raises(ValueError, match="hold a Partial"):
        zeros(3, device_mesh=mesh, placements=[Partial()])
    module = nn.Linear(3, 4, device=device_type())

    def columns(name, child, mesh):
        child.register_parameter("weight", nn.Parameter(distribute_tensor(child.weight.data, mesh, [Shard(0)])))

    distribute_module(
        module,
        mesh,
        columns,
        lambda mod, inputs, mesh: (distribute_tensor(inputs[0], mesh, [R]),),
        lambda mod, out, mesh: out.full_tensor(),
    )
    x = torch.ones(2, 3, device=device_type())
    want = F.linear(x, module.weight.full_tensor(), module.bias.full_tensor())
    torch.testing.assert_close(module(x), want)
    assert module.bias.placements == (R,)
    assert set(module.state_dict()) == {"weight", "bias"}


@on_ranks(2)
def test_interception_off_a_dtensor_is_its_local_tensor():
    mesh = _mesh()
    given = distribute_tensor(_arange(4, 3), mesh, [Shard(0)])
    with torch._C.DisableTorchFunctionSubclass():
        assert given.shape == (2, 3) and given.numel() == 6
        assert type(given + given) is torch.Tensor
    made = wrap(_arange(2, 3), TensorSpec.of(mesh, (Shard(0),), (4, 3)))
    assert type(local_view(made)) is torch.Tensor


@on_ranks(2)
def test_nothing_grows():
    import gc

    from hp_dtensor.torch import dispatch

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
