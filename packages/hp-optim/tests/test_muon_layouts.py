"""Muon on ranks: the same bits for any layout and number of ranks, two collectives, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_layouts import (
    both,
    crossed,
    expert_parallel,
    give,
    hsdp,
    lay_plain,
    mesh_of,
    only_some,
    ragged,
    ragged_groups,
    slices,
    tensor_parallel,
)
from optim_models import Net, net
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_optim import Muon
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
STEPS = 10
HEADS = {"head_wise": True, "head_dim": 4, "head_wise_patterns": ["qkv.weight"]}


def matrices(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]


def trained(lay: Callable[[Net], None], dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = net(dtype).to(device_type())
    lay(model)
    optimizer = Muon(matrices(model), **options)
    for step in range(STEPS):
        give(model, step, dtype, ("last.weight",) if step == 4 else ())
        with count_collectives() as counts:
            optimizer.step()
        if step:  # the first one also compares the ranks
            assert sum(counts.values()) == (0 if lay is lay_plain else 2), counts
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in matrices(model)
    }


def check(lay: Callable[[Net], None], options: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64):
        truth, made = trained(lay_plain, dtype, **options), trained(lay, dtype, **options)
        for name in truth:
            assert torch.equal(truth[name], made[name]), (name, dtype, (truth[name] - made[name]).abs().max())


@pytest.mark.smoke
@on_ranks(2, 3)
@pytest.mark.parametrize("lay", [ragged, ragged_groups, slices, tensor_parallel, expert_parallel])
def test_bits_do_not_depend_on_the_layout(lay: Callable[[Net], None]):
    check(lay, {})


@on_ranks(2)
@pytest.mark.parametrize("lay", [ragged, expert_parallel])
def test_bits_of_products_in_bfloat16_do_not_depend_on_the_layout(lay: Callable[[Net], None]):
    check(lay, {"ns_dtype": "bfloat16"})


@on_ranks(4)
@pytest.mark.parametrize("lay", [ragged, hsdp, both, only_some, crossed])
def test_bits_do_not_depend_on_two_axes(lay: Callable[[Net], None]):
    check(lay, HEADS)


@on_ranks(2)
def test_a_gradient_on_one_rank_only():
    """Experts without tokens: their rank takes part, with zeros, and their momentum still moves."""
    model, truth = net(), net()
    expert_parallel(model)
    ours, theirs = Muon(matrices(model)), Muon(matrices(truth))
    for step in range(3):
        for each in (model, truth):
            give(each, step, torch.float64)
        up: Any = model.experts.up
        rank = torch.distributed.get_rank()
        if step == 1:
            truth.experts.up.grad[2:] = 0  # type: ignore[index]
            if rank == 1:
                up.grad = None
        ours.step(), theirs.step()
    for name, parameter in matrices(model):
        assert torch.equal(parameter.full_tensor(), truth.get_parameter(name).detach()), name


@on_ranks(2, 3)
def test_a_broken_gradient_on_one_rank_stops_all(ranks: int):
    model = net(torch.float32)
    ragged(model)
    optimizer = Muon(matrices(model))
    give(model, 0, torch.float32)
    optimizer.step()
    before = {name: parameter.to_local().clone() for name, parameter in matrices(model)}
    give(model, 1, torch.float32)
    last = [parameter.grad for name, parameter in matrices(model) if name == "last.weight"][0].to_local()
    if torch.distributed.get_rank() == ranks - 1:
        assert last.numel()
        last[-1] = float("nan")
    with pytest.warns(RuntimeWarning, match=r"Muon: the gradients of 'last.weight' have values that are infinite"):
        optimizer.step()
    for name, parameter in matrices(model):
        assert torch.equal(parameter.to_local(), before[name])


@on_ranks(2)
@pytest.mark.parametrize("what", ["fewer", "settings"])
def test_ranks_with_different_parameters(what: str):
    model = net(torch.float32)
    expert_parallel(model)
    first = torch.distributed.get_rank() == 0
    listed = matrices(model)
    options = {"ns_steps": 4} if what == "settings" and first else {}
    optimizer = Muon(listed[:-2] if what == "fewer" and first else listed, **options)
    give(model, 0, torch.float32)
    expected = {
        "fewer": "no more parameters" if first else r"'last.weight' of shape \(3, 8\)",
        "settings": r"'first.weight' of shape \(8, 6\)",
    }
    with pytest.raises(ValueError, match=f"ranks have different parameters or settings.*{expected[what]}"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("count", [2, 20, 200])
def test_two_collectives_for_any_number_of_matrices(count: int):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))
    fully_shard(model, mesh_of(2))
    optimizer = Muon(model.named_parameters())
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        with count_collectives() as counts:
            optimizer.step()
        optimizer.zero_grad()
    assert dict(counts) == {"all_to_all": 2}


@on_ranks(4)
def test_layouts_that_are_not_the_same_on_all_ranks_are_refused_on_all():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))

    def steps(rows: int, columns: bool = False) -> None:
        model = nn.Linear(6, rows, bias=False).to(device_type())
        model.weight = nn.Parameter(distribute_tensor(torch.zeros_like(model.weight), mesh["tp"], [Shard(0)]))
        fully_shard(model, mesh["dp"], shard_placement_fn=(lambda p: Shard(1)) if columns else None)
        model.weight.grad = torch.ones_like(model.weight)
        Muon(model.parameters()).step()
        truth = nn.Parameter(torch.zeros(rows, 6, device=device_type()))
        truth.grad = torch.ones_like(truth)
        Muon([truth]).step()
        torch.testing.assert_close(model.weight.full_tensor(), truth)

    with pytest.raises(
        ValueError, match=r"a layout is not the same on all ranks: .* make the features divide|ranks \[0, 2\]"
    ):
        steps(3)  # two rows and one
    steps(4), steps(3, columns=True)


@on_ranks(4)
def test_meshes_that_no_mesh_joins_and_a_partial_parameter():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))
    other = DeviceMesh(device_type(), torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("c", "d"))
    whole = init_device_mesh(device_type(), (4,), mesh_dim_names=("e",))

    def stepped(*meshes: DeviceMesh) -> None:
        weights = [nn.Parameter(distribute_tensor(torch.zeros(4, 4), each, [Shard(0)])) for each in meshes]
        for each in weights:
            each.grad = torch.ones_like(each)
        Muon(weights).step()
        assert torch.equal(weights[0].full_tensor(), weights[1].full_tensor()) and bool(
            (weights[0] < 0).full_tensor().all()
        )

    with pytest.raises(ValueError, match=r"one of them must have all ranks, or both must be slices, by name, of one m"):
        stepped(mesh["a"], other["d"])
    stepped(mesh["a"], mesh["b"]), stepped(mesh["a"], whole)
    partial = DTensor.from_local(torch.ones(4, 4, device=device_type()), whole, [Partial()])
    with pytest.raises(ValueError, match=r"is placed \(Partial\(\),\): reduce it before it is trained"):
        Muon([nn.Parameter(partial)])
    Muon([nn.Parameter(partial.redistribute(placements=[Replicate()]))])
