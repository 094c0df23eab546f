"""A job of 24 micro-batches a step, cut over any number of ranks, whose weights are compared as bits."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import MixedPrecisionPolicy, clip_grad_norm_, full_state_dict, fully_shard
from hp_testing import device_type

MICRO_BATCHES = 24
STEPS = 3


class Twice(nn.Module):
    """Sizes that blocks of 1024 elements don't divide; its middle is called twice, a part of it is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 37)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(37, 61), nn.GELU(), nn.Linear(61, 37)) for _ in range(2))
        self.seldom = nn.Linear(37, 37)
        self.last = nn.Linear(37, 3)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        if seldom:
            x = x + self.seldom(x)
        return self.last(x)


def shard(mesh: Any, **options: Any) -> nn.Module:
    """The model with the same weights everywhere, sharded."""
    torch.manual_seed(1)
    model = Twice().to(device_type())
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(model, mesh, **options)


def weights_after(
    *,
    replicas: int = 1,
    optimizer: str = "foreach",
    low: bool = False,
    way: str = "no sync",
    deterministic: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Trains for three steps on this rank's share of the micro-batches.

    Args:
        replicas: size of the axis to replicate over; 1 is a mesh of one axis.
        optimizer: how AdamW steps: foreach, fused or loop.
        low: compute in bfloat16, reduce in float32.
        way: how all backward passes of a step but the last are told of: no sync, or not last.
        deterministic: the mode to test.
        options: for `fully_shard`.

    Returns:
        ``hash`` of all weights, and ``norms`` of each step as floats.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shape, names = ((replicas, ranks // replicas), ("r", "s")) if replicas > 1 else ((ranks,), ("s",))
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=names)
    if low:
        options["mixed_precision"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(mesh, deterministic=deterministic, **options)
    model.set_reduce_op_type("sum")
    made = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=optimizer == "foreach", fused=optimizer == "fused")
    count = MICRO_BATCHES // ranks
    norms = []
    for step in range(STEPS):
        for index in range(count):
            number = rank * count + index
            last = index == count - 1
            if way == "no sync":
                model.set_requires_gradient_sync(last)
            else:
                model.set_is_last_backward(last)
            loss_of_micro_batch(model, step, number).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.01).item())
        made.step()
        made.zero_grad(set_to_none=step > 0)
    return {"hash": hash_of(model), "norms": norms}


def loss_of_micro_batch(model: nn.Module, step: int, number: int) -> torch.Tensor:
    """The loss of one micro-batch, over the number of them all."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(2, 5, generator=generator).to(device_type())
    output = model(x, seldom=number in (1, 17, 23) or step == 1)
    return (output.float() - 1).pow(2).mean() / MICRO_BATCHES


def hash_of(model: nn.Module) -> str:
    """The sha256 of all weights."""
    digest = hashlib.sha256()
    for name, tensor in full_state_dict(model, cpu=True).items():
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
