"""Redistribution of a DTensor and of its gradient: values, layouts, and how many collectives each takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from behaviours import P, R, close, counted, line, place, rand

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)

MOVES = [
    (S0, R, "all_gather", ""),
    (S1, R, "all_gather", ""),
    (R, R, "", ""),
    (R, S0, "", "all_gather"),
    (R, S1, "", "all_gather"),
    (P, R, "all_reduce", ""),
    (P, S0, "reduce_scatter", "all_gather"),
    (P, S1, "reduce_scatter", "all_gather"),
    (P, P, "", ""),
    (S0, S0, "", ""),
    (S0, S1, "all_to_all", "all_to_all"),
    (S1, S0, "all_to_all", "all_to_all"),
]


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_one_collective_there_and_one_back(dtype: torch.dtype) -> None:
    mesh = line(4)
    for (source, target, there, back), size in itertools.product(MOVES, (12, 13, 14, 3)):
        what = f"{source} -> {target} of {size} {dtype}"
        whole = rand(size, size, dtype=dtype)
        x = place(whole, mesh, source, grad=True)
        made, counts = counted(lambda x=x, target=target: x.redistribute(mesh, [target]))
        if size < 4 and there == "all_gather":  # what is far from even is sent as it is
            there = "all_to_all"
        assert counts == ({there: 1} if there else {}), what
        assert made.placements == (target,) and made.shape == whole.shape, what
        close(made.detach(), whole, what)
        start = place(torch.ones_like(whole), mesh, R if target.is_partial() else target)
        _, counts = counted(lambda made=made, start=start: made.backward(start))
        if size < 4 and back == "all_gather":
            back = "all_to_all"
        assert counts == ({back: 1} if back else {}), f"backward of {what}"
        assert x.grad.placements == (R if source.is_partial() else source,), what
        close(x.grad, torch.ones_like(whole), what)


@on_ranks(2)
def test_a_gathered_value_with_a_partial_gradient_is_scattered_once() -> None:
    mesh = line(2)
    for source, forward, backward in ((S0, {"all_gather": 1}, {"reduce_scatter": 1}), (R, {}, {"all_reduce": 1})):
        x = place(rand(6, 3), mesh, source, grad=True)
        local, counts = counted(lambda x=x: x.redistribute(placements=[R]).to_local(grad_placements=[P]))
        assert counts == forward
        _, counts = counted(lambda local=local: local.backward(torch.ones_like(local)))
        assert counts == backward
        close(x.grad, torch.full((6, 3), 2.0, dtype=torch.float64, device=device_type()))


@on_ranks(4)
@pytest.mark.parametrize("shape", [(8, 8), (8, 5), (5, 8), (5, 5), (8, 8, 8), (3, 1, 7)], ids=str)
def test_another_dim_on_two_axes(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    changes: list[tuple[tuple[Placement, ...], tuple[Placement, ...], int]] = [
        ((S0, S1), (S0, S0), 1),
        ((S0, S1), (S1, S0), 2),
        ((S0, S0), (S1, S1), 2),
    ]
    if len(shape) > 2:
        changes += [((S0, S2), (S1, S0), 2), ((S1, S1), (S1, S2), 1)]
    for source, target, most in changes:
        x = place(rand(*shape), mesh, *source)
        made, counts = counted(lambda x=x, target=target: x.redistribute(mesh, target))
        assert made.placements == target and sum(counts.values()) <= most, f"{source} -> {target}: {counts}"
        assert torch.equal(made.to_local(), place(rand(*shape), mesh, *target).to_local())


@on_ranks(8)
def test_another_dim_on_three_axes() -> None:
    mesh, whole = init_device_mesh(device_type(), (2, 2, 2)), rand(8, 8, 8)
    for source, target, most in [
        ((S0, S0, S0), (S1, S1, S1), 3),
        ((S0, S1, S0), (S1, S0, S0), 3),
        ((S0, S1, S2), (S2, S1, S0), 3),  # two would do, but fewer bytes come first
        ((S1, S0, S0), (R, S0, S0), 1),
        ((S1, R, S0), (R, S0, S0), 3),  # as above
        ((S0, S0, S1), (S0, S1, S2), 2),
    ]:
        x = place(whole, mesh, *source)
        made, counts = counted(lambda x=x, target=target: x.redistribute(mesh, target))
        assert sum(counts.values()) <= most, f"{source} -> {target}: {counts}"
        assert torch.equal(made.to_local(), place(whole, mesh, *target).to_local())


@on_ranks(4)
def test_an_axis_of_one_rank_takes_no_collective() -> None:
    mesh, whole = init_device_mesh(device_type(), (4, 1)), rand(16, 8)
    for source, target in itertools.product((S1, R, P), (S0, S1, R, P)):
        x = place(whole, mesh, S0, source)
        made, counts = counted(lambda x=x, target=target: x.redistribute(mesh, [S0, target]))
        assert not counts and made.placements == (S0, target)
        close(made, whole)


@on_ranks(4)
def test_sums_over_several_axes() -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    mine = torch.full((8, 6), float(mesh.get_rank() + 1), dtype=torch.float64, device=device_type())
    for source, target, total in [
        ((P, P), (R, R), 10.0),
        ((P, P), (S0, S0), 10.0),
        ((P, P), (S0, S1), 10.0),
        ((P, P), (P, R), 10.0),
        ((Partial("max"), Partial("max")), (R, R), 4.0),
        ((Partial("avg"), P), (R, S0), 5.0),
    ]:
        made = DTensor.from_local(mine, mesh, source).redistribute(mesh, target)
        assert made.placements == target
        close(made, torch.full_like(mine, total), f"{source} -> {target}")
    for mixed in ((Partial("min"), P), (P, Partial("max"))):
        with pytest.raises(ValueError, match="whose order of reduction matters"):
            DTensor.from_local(mine, mesh, mixed)
    sums = DTensor.from_local(mine, mesh, (P, P))
    assert sum(counted(lambda: sums.redistribute(mesh, (S0, S1)))[1].values()) == 2
    assert counted(lambda: sums.redistribute(mesh, (P, R)))[1] == {"all_reduce": 1}


@on_ranks(2)
def test_values_are_cut_for_a_sum_and_whole_for_an_average() -> None:
    mesh, whole = line(2), rand(3, 4)
    x = place(whole, mesh, R, grad=True)
    for target in (P, Partial("avg"), Partial("max"), Partial("min"), Partial("product")):
        made, counts = counted(lambda target=target: x.redistribute(placements=[target]))
        assert not counts and made.is_partial()
        close(made.detach(), whole, target)
    with pytest.raises(ValueError, match="placements"):
        x.redistribute(mesh, [Replicate(), Replicate()])


@on_ranks(2)
def test_a_layout_is_not_the_list_that_it_was_made_from() -> None:
    mesh, placements = line(2), [S0]
    x = DTensor.from_local(rand(3, 3), mesh, placements)
    placements[0] = R
    assert x.placements == (S0,)
    assert hash(x._spec) == hash(DTensor.from_local(rand(3, 3) + 1, mesh, [S0])._spec)
    assert DTensor.from_local(rand(3, 3), mesh, [Shard(-1)]).placements == (S1,)
