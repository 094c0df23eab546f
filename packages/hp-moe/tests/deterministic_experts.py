"""A job of four micro-batches a step over any number of ranks, whose weights are compared as bits."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_dtensor import DTensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_moe import ExpertParallel, ExpertPlacement, MoE, place_experts
from hp_styles import parallelize_module
from hp_testing import device_type

MICRO_BATCHES, EXPERTS, TOKENS, WIDTH = 4, 6, 9, 12


class Model(nn.Module):
    """Two mixtures and a projection; expert 1 of both is hot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MoE(WIDTH, 20, EXPERTS, top_k=2)
        self.second = MoE(WIDTH, 20, EXPERTS, top_k=2, score_before_experts=False)
        self.last = nn.Linear(WIDTH, 3)
        with torch.no_grad():
            for moe in (self.first, self.second):
                moe.router.gate.weight[1] += 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return self.last(x + self.second(x))


def shuffled(ranks: int, seed: int, slots: int = 0, *, moves: bool = True) -> ExpertPlacement:
    """Place experts evenly, or anywhere, as many on each rank, with replicas as far as there are slots."""
    rng, home = random.Random(seed), list(ExpertPlacement.even(EXPERTS, ranks).home)
    if moves:
        rng.shuffle(home)
    replicas: list[tuple[int, ...]] = [()] * EXPERTS
    for rank in range(ranks):
        others = [expert for expert in range(EXPERTS) if home[expert] != rank]
        for expert in rng.sample(others, min(slots, len(others))):
            replicas[expert] = (*replicas[expert], rank)
    return ExpertPlacement(tuple(home), tuple(tuple(sorted(each)) for each in replicas), ranks)


def weights_after(steps: int, *, slots: int = 0, moves: bool = False, deterministic: bool = True) -> torch.Tensor:
    """Train on this rank's share of the micro-batches.

    Args:
        steps: of the optimizer.
        slots: replicas on each rank, other ones in each step.
        moves: experts get other homes in each step.
        deterministic: the mode to test.

    Returns:
        All weights, flat.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device_type(), (ranks,), mesh_dim_names=("ep",))
    torch.manual_seed(1)
    model = Model().to(device_type())
    style = ExpertParallel(combine="exact", slots=slots, deterministic=deterministic)
    layers: list[Any] = [model.first.experts, model.second.experts]
    for experts in layers:
        parallelize_module(experts, mesh, style)
    sharded: Any = fully_shard(
        model, mesh, deterministic=True, ignored_params={each for experts in layers for each in experts.parameters()}
    )
    sharded.set_reduce_op_type("sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    count = MICRO_BATCHES // ranks
    for step in range(steps):
        for index in range(count):
            generator = torch.Generator().manual_seed(100 * step + rank * count + index)
            x = torch.randn(TOKENS, WIDTH, generator=generator).to(device_type())
            sharded.set_requires_gradient_sync(index == count - 1)
            (model(x).square().mean() / MICRO_BATCHES).backward()
        for number, experts in enumerate(layers if slots or moves else ()):
            place_experts(experts, shuffled(ranks, 2 * step + number, slots, moves=moves), optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).cpu()
