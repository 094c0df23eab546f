"""Process groups that PyTorch made, or knows."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

import hp_platform
from hp_platform import get_platform
from hp_platform.groups import known_groups
from hp_testing import close_pools, device_type, on_ranks, run_ranks

pytestmark = pytest.mark.device


@on_ranks(2)
def test_torch_knows_the_groups():
    groups = get_platform().groups
    assert groups.new_group([0, 1]) is dist.group.WORLD
    assert (groups.rank(), groups.backend()) == (dist.get_rank(), dist.get_backend())
    alone = groups.new_group([dist.get_rank()])
    tensor = torch.ones(1, device=device_type())
    dist.all_reduce(tensor, group=alone)
    assert dist.get_rank(alone) == 0
    assert dist.get_process_group_ranks(alone) == [dist.get_rank()]


@on_ranks(3)
def test_groups_made_elsewhere_are_reused():
    known_groups().pop((0, 2), None)  # an earlier test's: ranks live on, and a set of ranks keeps the group that it has
    world, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 2])
    groups, barrier = get_platform().groups, get_platform().collectives.barrier
    assert groups.new_group([0, 1, 2]) is dist.group.WORLD
    if dist.get_rank() != 1:
        hp_platform.mark_created_groups([world, pair])
        assert groups.new_group([0, 1, 2]) is dist.group.WORLD
        assert groups.new_group([0, 2]) is pair
        barrier(pair)  # gloo: a rank that destroys a group while a peer still connects to it breaks the peer
        groups.destroy(pair)
    barrier(world)
    dist.destroy_process_group(world)


def test_the_fake_backend_stands_for_many_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    platform = get_platform()
    hp_platform.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        group = platform.groups.new_group(range(3, 64, 4))
        assert (platform.groups.size(group), platform.groups.rank(group)) == (16, 0)
        piece, whole = torch.ones(2), torch.empty(32)
        platform.collectives.all_gather(whole, piece, group=group)
        platform.collectives.reduce_scatter(piece, whole, "avg", group=group)
        platform.collectives.all_reduce(piece, group=group, async_op=True).wait()
        platform.collectives.barrier(group)
    finally:
        hp_platform.destroy_process_group()


def join_by_environment(port: int) -> tuple[int, bool]:
    """Leave the pool's default group for one of torchrun's environment."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = get_platform().groups
    before = groups.new_group([rank])
    rank = size - 1 - rank
    with pytest.raises(RuntimeError, match=r"its rank is .* Call destroy_process_group\(\) first"):
        hp_platform.init_process_group(rank=rank)
    hp_platform.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    hp_platform.init_process_group()
    tensor = torch.ones(1, device=device_type())
    get_platform().collectives.all_reduce(tensor, group=groups.new_group(range(size)))
    assert dist.get_rank() == rank
    return int(tensor.item()), groups.new_group([rank]) is before


def test_the_environment_of_torchrun():
    if device_type() != "cpu" and get_platform().devices.count < 2:
        pytest.skip("the default backend of an accelerator needs a device for each rank")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        assert run_ranks(2, join_by_environment, port) == [(2, False)] * 2
    finally:
        close_pools()


@on_ranks(3)
def test_a_group_of_some_ranks_does_not_split_the_communicator_of_a_bound_world():
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) leaves it
    try:
        if dist.get_rank() != 1:
            group = get_platform().groups.second_group([0, 2])
            assert group.bound_device_id is None and world.bound_device_id == torch.device("cuda", 0)
            assert group.size() == 2
    finally:
        world.bound_device_id = None


@on_ranks(2)
def test_a_device_that_a_group_does_not_reach_is_named():
    with pytest.raises(ValueError, match="of backend .* does not communicate from meta: use a device of that backend"):
        get_platform().collectives.has_tags(dist.group.WORLD, "meta")
    assert isinstance(get_platform().collectives.has_tags(dist.group.WORLD, device_type()), bool)
