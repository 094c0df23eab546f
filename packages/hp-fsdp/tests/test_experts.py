"""Experts on a mesh of their own: a group for them, beside the groups of all ranks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import batch, close, data_mesh, loss_of, same_gradients, same_weights, seeded
from torch import nn

from hp_dtensor import RaggedShard, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.extend import mark_summed_gradients
from hp_fsdp import clip_grad_norm_, fully_shard
from hp_platform import collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


class Gather(torch.autograd.Function):
    """All tokens of a group; the gradient of each is the sum of the ranks'. ``back`` swaps the two."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, back: bool) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return own_sum(x, group) if back else everyone(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return (everyone if ctx.back else own_sum)(grad, ctx.group), None, None


def everyone(x: torch.Tensor, group: Any) -> torch.Tensor:
    made = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    collectives.all_gather(made, x.contiguous(), group=group)
    return made


def own_sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    summed = x.clone()
    collectives.all_reduce(summed, "sum", group=group)
    return summed.chunk(dist.get_world_size(group))[dist.get_rank(group)]


class Experts(nn.Module):
    """Four experts, each for every token; with a group, each rank has some of them and computes them for all."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, 5) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return torch.einsum("td,edh->teh", x, self.weight).tanh().sum(1)
        weight: Any = self.weight
        tokens = Gather.apply(x, self.group, False)
        made = torch.einsum("td,edh->teh", tokens, weight.to_local()).tanh().sum(1)
        return Gather.apply(made, self.group, True)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(5, 5), Experts(), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts(self.first(x)))


@on_ranks(4)
@pytest.mark.parametrize("dim", [None, 1, 2])
def test_experts_have_a_group_on_a_mesh_of_their_own(dim: int | None):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_shard", "ep"))
    reference = seeded(Sparse)
    model: Any = copy.deepcopy(reference)
    experts = model.experts
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)]))
    experts.group = mesh.get_group("ep")
    fully_shard(experts, mesh["dp_shard"], shard_placement_fn=lambda p: None if dim is None else Shard(dim))
    fully_shard(model, mesh["dp_shard", "ep"]._flatten("dp"))
    placement = experts.weight.placements[0]
    assert isinstance(placement, RaggedShard) if dim is None else placement == Shard(dim)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (reference, model)]
    for step in range(2):
        for net, x in zip((reference, model), batch(step), strict=True):
            loss_of(net(x)).backward()
        same_gradients(model, reference)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, reference)


@dataclasses.dataclass
class ShardPlacementResult:
    """As torch names it."""

    placement: Any
    mesh_info: Any


@on_ranks(1)
def test_a_mesh_for_a_parameter_of_a_group_is_refused():
    with pytest.raises(NotImplementedError, match=r"mesh for 'first.weight'.*call fully_shard\(experts, mesh_of_exp"):
        fully_shard(seeded(Sparse), data_mesh(), shard_placement_fn=lambda _: ShardPlacementResult(Shard(0), None))
    # The test above does what it says.


@on_ranks(4)
def test_experts_without_a_group_of_their_own_are_refused():
    for shape, text in (
        (
            (2, 2),
            r"is a part of the mesh of data parallelism, .*divides it over 2 of 4 ranks.*Pass the other axes alone",
        ),
        (
            (1, 4),
            "of experts is spread over ranks of .*Call fully_shard on the experts first, with the mesh of the other",
        ),
    ):
        mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "ep"))
        reference = seeded(Sparse)
        model: Any = copy.deepcopy(reference)
        experts, world = model.experts, mesh["dp", "ep"]._flatten("world")
        mark_summed_gradients(experts)  # as hp_moe does
        experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], [Shard(0)]))
        experts.group = mesh.get_group("ep")
        with pytest.raises(ValueError, match=text):
            fully_shard(model, world)
        fully_shard(experts, mesh["dp"])
        fully_shard(model, world)
        step_of_both(reference, model)


@on_ranks(4)
def test_a_group_on_some_of_the_ranks_is_refused():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "ep"))
    world = mesh["dp", "ep"]._flatten("world")
    reference, model, other = seeded(Sparse), seeded(Sparse), seeded(Sparse)
    fully_shard(model.first, mesh["dp"])
    fully_shard(model, world)
    with pytest.raises(ValueError, match="'weight' is on .*2 of the 4 ranks of .*Pass the outermost group's mesh, or"):
        model(batch()[1])
    fully_shard(other.first, world)
    fully_shard(other, world)
    step_of_both(reference, other)


@on_ranks(4)
def test_experts_that_are_spread_unevenly_are_cut_along_another_dim():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "ep"))
    reference = seeded(Sparse)
    model: Any = copy.deepcopy(reference)
    experts = model.experts
    uneven = [RaggedShard((0,), (3, 1))]
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["ep"], uneven))
    experts.group = mesh.get_group("ep")
    with pytest.raises(ValueError, match=r"is spread unevenly over .*shard_placement_fn=lambda parameter: Shard\(1\)"):
        fully_shard(experts, mesh["dp"])
    fully_shard(experts, mesh["dp"], shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(model, mesh["dp", "ep"]._flatten("world"))
    step_of_both(reference, model)


def step_of_both(reference: nn.Module, model: nn.Module) -> None:
    for net, x in zip((reference, model), batch(), strict=True):
        loss_of(net(x)).backward()
    same_gradients(model, reference)
