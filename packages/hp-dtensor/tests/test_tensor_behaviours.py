"""DTensors as tensors: making, reading by index, saving, leaving the ranks outside alone, functions on local parts."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviours import P, R, close, counted, like_one_device, line, place, rand
from torch import nn

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Shard,
    StridedShard,
    custom_shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hp_dtensor.debugging.debug import CommDebugMode
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
S0, S1 = Shard(0), Shard(1)


# ---- making ----
@on_ranks(2, 3)
def test_new_tensors_are_laid_out_as_what_they_are_made_from(ranks: int) -> None:
    mesh, whole = line(ranks), rand(7, 4)
    for placement in (S0, S1, R, P):
        x = place(whole, mesh, placement)
        out = R if placement == P else placement
        for make, value in (
            (lambda t, *s: t.new_zeros(*s), 0),
            (lambda t, *s: t.new_ones(s), 1),
            (lambda t, *s: t.new_full(s, 42.0), 42),
            (lambda t, *s: t.new_empty(s, dtype=torch.float32).fill_(3), 3),
            (lambda t, *s: t.new_empty_strided(s, (s[1], 1)).fill_(4), 4),
            (lambda t, *s: t.new_empty_strided(s, (1, s[0]), dtype=torch.float32).fill_(5), 5),
        ):
            like, counts = counted(lambda x=x, make=make: make(x, 7, 4))
            assert not counts and like.placements == (out,) and like.shape == (7, 4)
            assert like.local_shape == place(whole, mesh, out).local_shape and like.full_tensor().eq(value).all()
            other, counts = counted(lambda x=x, make=make: make(x, 4, 7))
            assert not counts and other.placements == (R,) and other.shape == (4, 7)
        assert ranks == 3 or x.new_empty_strided((7, 4), (1, 7)).stride() == (1, 7)
        assert x.new_tensor([1.0, 2.0]).placements == (R,)


@on_ranks(2)
def test_from_local_checks_what_ranks_hold() -> None:
    mesh = line(2)
    first = mesh.get_local_rank() == 0
    for local, message in (
        (torch.ones(3, 3, dtype=torch.float64 if first else torch.float32), "disagree on the dtype or requires_grad"),
        (torch.ones(3, 3).requires_grad_(first), "disagree on the dtype or requires_grad"),
        (torch.ones(3, 4) if first else torch.ones(3, 4).t(), "disagree on the global shape"),
        (torch.ones(3) if first else torch.ones(3, 1), "disagree on the global shape"),
    ):
        local = local.to(device_type())
        with pytest.raises(ValueError, match=message):
            DTensor.from_local(local, mesh, [S0], run_check=True)
        DTensor.from_local(local, mesh, [S0])
    assert DTensor.from_local(torch.ones(2), mesh, [S0]).device.type == device_type(), "moved to the mesh's devices"


@on_ranks(2)
def test_a_tensor_in_a_graph_is_not_cut_off_in_silence() -> None:
    mesh, x = line(2), rand(4, 3).requires_grad_()
    with pytest.raises(ValueError, match="would be detached from their gradients"):
        distribute_tensor(x * 2, mesh, [S0])
    assert distribute_tensor((x * 2).detach(), mesh, [S0]).is_leaf
    made = DTensor.from_local(x * 2, mesh).redistribute(placements=[S0])
    made.sum().backward()
    close(x.grad, torch.full_like(x, 2.0))


@on_ranks(2)
def test_on_meta_first() -> None:
    mesh = line(2)
    for placement in (S0, R):
        for meta in (
            distribute_tensor(torch.randn(6, 4, device="meta"), mesh, [placement]),
            DTensor.from_local(torch.randn(3 if placement == S0 else 6, 4, device="meta"), mesh, [placement]),
        ):
            assert meta.is_meta and meta.shape == (6, 4)
            made = torch.empty_like(meta, device=device_type())
            nn.init.constant_(made, 1.5)
            assert made.placements == (placement,) and not made.is_meta and made.full_tensor().eq(1.5).all()
    model = distribute_module(
        nn.Sequential(nn.Linear(4, 6, device="meta"), nn.Linear(6, 2, device="meta")),
        mesh,
        lambda name, module, mesh: [
            module.register_parameter(n, nn.Parameter(distribute_tensor(p, mesh, [S0])))
            for n, p in list(module._parameters.items())
            if p is not None
        ],
    )
    model.to_empty(device=device_type())
    assert all(p.placements == (S0,) and p.device.type == device_type() for p in model.parameters())
    assert next(model.to(torch.bfloat16).parameters()).to_local().dtype is torch.bfloat16


@on_ranks(2)
def test_files_that_nobody_vouches_for() -> None:
    named = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("a", "b"))
    for mesh in (line(2), named, named["a"]):
        for placement in (S0, R, Partial("avg"), StridedShard(0, 2), RaggedShard((0,), (1, 3))):
            x = nn.Parameter(place(rand(4, 2), mesh, placement, *[R] * (mesh.ndim - 1)))
            buffer = io.BytesIO()
            torch.save({"x": x, "y": x.detach() * 2}, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=True)
            assert isinstance(loaded["x"], nn.Parameter) and loaded["x"]._spec is x._spec
            assert torch.equal(loaded["x"].to_local(), x.to_local()) and loaded["y"].placements == x.placements


@on_ranks(4)
def test_ranks_outside_a_mesh_hold_nothing() -> None:
    mesh = DeviceMesh(device_type(), [0, 2])
    inside = mesh.get_coordinate() is not None
    x = DTensor.from_local(torch.ones(4, 3, device=device_type()), mesh, [S0])
    assert x.shape == (8, 3)
    made = x + 2
    halves = made.split([2, 1], dim=1)
    whole = made.redistribute(placements=[R])
    for t, shape in (
        (made, (4, 3)),
        (halves[0], (4, 2)),
        (whole, (8, 3)),
        (whole.redistribute(placements=[S0]), (4, 3)),
    ):
        local = t.to_local()
        assert tuple(local.shape) == shape and local.eq(3).all() if inside else not local.numel()
    most = (x.view(2, 4, 3) * 2).max(dim=-1)
    assert tuple(most.values.shape) == (2, 4) and (most.values.to_local().eq(2).all() or not inside)
    assert torch.stack([x, x], 1)[:, 1, None].permute(2, 1, 0).sum(0).shape == (1, 8)
    assert x.equal(x.clone()) and float(x.sum().to_local()) == (12.0 if inside else 0.0)


# ---- reading by index ----
@on_ranks(2, 3)
def test_gathering_along_a_dim(ranks: int) -> None:
    mesh, whole = line(ranks), rand(6, 8, 5)
    for dim in range(3):
        shape = [4, 4, 4]
        index = (rand(*shape).abs() * 100).long() % whole.shape[dim]
        made, counts = like_one_device(lambda t, i, d=dim: torch.gather(t, d, i), [whole, index], mesh, [(R,), (R,)])
        assert not counts and made.placements == (R,)
        call = lambda t, i, d=dim: t.gather(d, i)  # noqa: E731
        made, counts = like_one_device(call, [whole, index], mesh, [(R,), (Shard(dim),)])
        assert not counts and made.placements == (Shard(dim),), "the index is cut along the gathered dim"
        made, counts = like_one_device(call, [whole, index], mesh, [(Shard(dim),), (R,)])
        assert not counts and made.placements == (P,), "each rank gives what it has"
    labels = (rand(6, 8).abs() * 100).long() % 5
    for logits, own in itertools.product((S0, S1, Shard(2), P, R), (R, S0)):
        made, counts = like_one_device(
            lambda t, y: -t.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1).mean(),
            [whole, labels],
            mesh,
            [(logits,), (own,)],
        )
        assert sum(counts.values()) <= 1 + (logits == S1 and own == S0)
    indices = torch.tensor([[0, 3], [5, 1]], device=device_type())
    for cut in (S0, S1, Shard(2), StridedShard(0, 2), StridedShard(0, 3)):
        if ranks == 2 or not isinstance(cut, StridedShard):
            like_one_device(lambda t, i: t[i] + t[:, i[0]].sum(), [whole, indices], mesh, [(cut,), (R,)])
            like_one_device(lambda t, i: t.gather(0, i[..., None]), [whole, indices], mesh, [(cut,), (S0,)])


@on_ranks(4)
def test_stacks_of_parts() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    a = DTensor.from_local(rand(4, 8), mesh, [P, R])
    b = DTensor.from_local(rand(4, 8), mesh, [P, P])
    made, counts = counted(lambda: torch.stack([a, b]))
    assert not counts and made.placements == (P, P)
    close(made, torch.stack([a.full_tensor(), b.full_tensor()]))
    for dim, out in ((0, Shard(2)), (1, Shard(2)), (2, S1)):
        made, counts = like_one_device(lambda t, d=dim: torch.stack([t, t * 2], dim=d), [rand(8, 8)], line(4), [(S1,)])
        assert not counts and made.placements == (out,)


@on_ranks(2)
def test_a_slice_is_gathered_once_and_its_gradient_too() -> None:
    mesh, whole = line(2), rand(8, 6)
    x = place(whole, mesh, S1, grad=True)
    part, counts = counted(lambda: x[:, 3:])
    assert sum(counts.values()) == 1
    _, counts = counted(lambda: part.backward(place(torch.ones_like(whole[:, 3:]), mesh, S1)))
    assert sum(counts.values()) <= 1
    expected = torch.zeros_like(whole)
    expected[:, 3:] = 1
    close(x.grad, expected)


# ---- modules ----
@on_ranks(2, 3)
@pytest.mark.parametrize("padding", [None, 10])
def test_embeddings_cut_along_either_dim(padding: int | None, ranks: int) -> None:
    mesh, ids = line(ranks), (rand(5, 4).abs() * 1000).long() % 15
    for cut, out in ((S0, P), (S1, Shard(2))):
        plain = nn.Embedding(15, 7, padding_idx=padding, dtype=torch.float64, device=device_type())
        own = copy.deepcopy(plain)
        own.weight = nn.Parameter(distribute_tensor(own.weight.detach(), mesh, [cut]))
        plain.weight.data.copy_(own.weight.full_tensor())
        made, counts = counted(lambda own=own: own(place(ids, mesh, R)))
        assert not counts and made.placements == (out,)
        expected = plain(ids)
        close(made.detach(), expected.detach())
        whole, counts = counted(lambda made=made: made.full_tensor())
        assert sum(counts.values()) == 1
        _, counts = counted(lambda whole=whole: whole.square().sum().backward())
        assert not counts
        expected.square().sum().backward()
        close(own.weight.grad, plain.weight.grad)
    with pytest.raises(NotImplementedError, match="max_norm"):
        F.embedding(place(ids, mesh, R), own.weight, max_norm=2.0)


@on_ranks(2)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_replicated_weights(dims: int) -> None:
    mesh = line(2)
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    plain = kind(4, 6, 3, padding=1, dtype=torch.float64, device=device_type())
    model = distribute_module(copy.deepcopy(plain), mesh)
    for parameter, truth in zip(model.parameters(), plain.parameters(), strict=True):
        truth.data.copy_(parameter.full_tensor())
    image = rand(2, 4, *(6,) * dims)
    for placement in (R, S0, Shard(dims + 1)):
        model.zero_grad()
        plain.zero_grad()
        x = place(image, mesh, placement)
        made, expected = model(x), plain(image)
        close(made.detach(), expected.detach())
        made.square().sum().backward()
        expected.square().sum().backward()
        assert x.grad is None
        for parameter, truth in zip(model.parameters(), plain.parameters(), strict=True):
            close(parameter.grad, truth.grad)


# ---- functions on local parts ----
@on_ranks(2)
@pytest.mark.parametrize("given", [S0, R], ids=repr)
def test_a_local_function_has_the_gradients_of_the_whole(given: Any) -> None:
    mesh, x, w = line(2), rand(4, 3), rand(3, 5)
    plain = [t.clone().requires_grad_() for t in (x, w)]
    (plain[0] @ plain[1]).square().sum().backward()
    a, b = place(x, mesh, given, grad=True), place(w, mesh, R, grad=True)
    rows = custom_shard(torch.mm, mesh, [S0], in_placements=([S0], [R]), redistribute_inputs=True)
    made = rows(a, b)
    assert made.placements == (S0,)
    made.square().sum().backward()
    close(a.grad, plain[0].grad)
    close(b.grad, plain[1].grad)
    a, b = place(x, mesh, S1, grad=True), place(w, mesh, S0, grad=True)
    sums = custom_shard(lambda p, q, factor: torch.mm(p, q) * factor, mesh, [P])
    made, counts = counted(lambda: sums(a, b, 1.0))
    assert not counts and made.placements == (P,)
    made.square().sum().backward()
    close(a.grad, plain[0].grad)
    close(b.grad, plain[1].grad)
    number = custom_shard(lambda p: p.shape[1], mesh, None)
    assert number(a.detach()) == a.local_shape[1]
    assert torch.equal(custom_shard(torch.mm, mesh, None)(x, w), x @ w), "plain tensors pass"


@on_ranks(2)
def test_what_is_sent_is_told_by_module_and_kind() -> None:
    mesh = line(2)
    model = distribute_module(nn.Linear(6, 4, bias=False), mesh)
    x = place(rand(4, 6, dtype=torch.float32), mesh, S0)
    with CommDebugMode() as comm:
        model(x).sum().backward()
    assert comm.get_comm_counts() == {"all_reduce": 1} and comm.get_total_counts() == 1
    (event,) = comm.events
    assert event.phase == "backward" and event.bytes == 4 * 6 * 4
