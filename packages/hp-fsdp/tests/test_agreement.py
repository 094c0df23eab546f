"""Ranks that did not shard the same model in the same way are told so, before they wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, data_mesh, pair, train
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def refused(model: nn.Module, match: str) -> None:
    with count_collectives() as counts, pytest.raises(ValueError, match=f"(?s)ranks sharded different models.*{match}"):
        model(torch.zeros(2, 5, dtype=torch.float64, device=device_type()))
    assert "reduce_scatter" not in counts


def sharded(net: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    mesh = mesh or data_mesh()
    net = net.to(device_type(), torch.float64)
    for block in net.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(net, mesh, **options)


@on_ranks(3)
def test_more_layers_on_one_rank():
    refused(sharded(Net(blocks=3 if dist.get_rank() == 1 else 2)), r"On some: 3 groups. On others: 4 groups")


@on_ranks(2)
def test_another_width():
    refused(sharded(Net(width=7 + dist.get_rank())), r"'first.weight\[7, 5\]'.*'first.weight\[8, 5\]'")


@on_ranks(2)
def test_another_dtype_and_other_groups():
    policy = MixedPrecisionPolicy(param_dtype=torch.float32) if dist.get_rank() else None
    refused(sharded(Net(), mixed_precision=policy), "torch.float64 as torch.float64.*torch.float64 as torch.float32")
    net = Net().to(device_type(), torch.float64)
    fully_shard(net.blocks[dist.get_rank()], data_mesh())
    refused(fully_shard(net, data_mesh()), "On some: group .*On others: group ")


@on_ranks(4)
def test_replicas_that_differ():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("r", "s"))
    refused(sharded(Net(blocks=2 + mesh.get_local_rank("r")), mesh), "On some: 3 groups. On others: 4 groups")


@on_ranks(2)
def test_it_is_asked_once():
    _, model = pair()
    for step in range(2):
        with count_collectives() as counts:
            model(batch()[1])
        assert counts["all_reduce"] == (step == 0)


@on_ranks(2)
def test_all_modules_are_deterministic_or_none():
    net = Net().to(device_type())
    fully_shard(net.blocks[0], data_mesh(), deterministic=True)
    with pytest.raises(ValueError, match=r"blocks.0 was sharded with deterministic=True, Net without"):
        fully_shard(net, data_mesh())(batch()[1].float())
    for deterministic in (True, False):
        train(*pair(deterministic=deterministic), steps=1)
