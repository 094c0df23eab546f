"""Process groups: one for each set of ranks."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

import hp_platform
from hp_platform import get_platform
from hp_platform.testing import close_pools, device_type, on_ranks, run_ranks


@on_ranks(1, 2, 3, 4)
def test_the_group_of_all_ranks_is_the_default_one(ranks):
    groups = get_platform().groups
    world = groups.new_group(range(ranks))
    assert world is dist.group.WORLD
    assert groups.ranks() == groups.ranks(world) == list(range(ranks))
    assert groups.size() == groups.size(world) == ranks
    assert groups.rank() == groups.rank(world) == dist.get_rank()
    assert groups.backend() == groups.backend(world) == dist.get_backend()


@on_ranks(3, 4)
def test_a_group_is_cached_by_its_set_of_ranks(ranks):
    groups = get_platform().groups
    rank = groups.rank()
    if rank == 0:
        return  # only members call
    group = groups.new_group(range(1, ranks))
    assert groups.new_group(list(reversed(range(1, ranks)))) is group
    assert groups.ranks(group) == list(range(1, ranks))
    assert groups.rank(group) == hp_platform.get_group_local_rank(group) == rank - 1
    total = torch.full((2,), float(rank), device=device_type())
    get_platform().collectives.all_reduce(total, group=group)
    assert total.tolist() == [sum(range(1, ranks))] * 2


@on_ranks(4)
def test_split_group_gives_each_rank_its_child():
    rank = dist.get_rank()
    child = hp_platform.split_group(split_ranks=[[0, 2], [1, 3]])
    assert hp_platform.get_process_group_ranks(child) == [rank % 2, rank % 2 + 2]
    assert hp_platform.split_group(split_ranks=[[2, 0], [3, 1]]) is child
    assert get_platform().groups.new_group([rank % 2, rank % 2 + 2]) is child
    # ranks of a child's child are ranks inside the parent
    grandchild = hp_platform.split_group(child, [[1]])
    assert (grandchild is None) == (rank < 2)
    if grandchild is not None:
        assert hp_platform.get_process_group_ranks(grandchild) == [rank]


@on_ranks(3)
def test_groups_made_elsewhere_are_reused():
    # a pair that no other test makes: ranks live on, and a set of ranks keeps the group that it has
    world, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 2])
    groups = get_platform().groups
    assert groups.new_group([0, 1, 2]) is dist.group.WORLD
    if dist.get_rank() != 1:
        hp_platform.mark_created_groups([world, pair])
        assert groups.new_group([0, 1, 2]) is dist.group.WORLD
        assert groups.new_group([0, 2]) is pair
        groups.destroy(pair)
    dist.destroy_process_group(world)


@on_ranks(2)
def test_a_destroyed_group_is_made_anew():
    groups = get_platform().groups
    rank = groups.rank()
    before = groups.new_group([rank])
    hp_platform.destroy_process_group(before)
    after = groups.new_group([rank])
    assert after is not before
    get_platform().collectives.all_reduce(torch.ones(1, device=device_type()), group=after)


@on_ranks(3)
def test_a_shared_group_is_destroyed_and_made_anew():
    if dist.get_rank() == 2:
        return
    groups = get_platform().groups
    for _ in range(3):
        group = groups.new_group([0, 1])
        tensor = torch.ones(1, device=device_type())
        get_platform().collectives.all_reduce(tensor, group=group)
        assert tensor.item() == 2
        groups.destroy(group)


@on_ranks(2)
def test_init_again():
    hp_platform.init_process_group()
    hp_platform.init_process_group(dist.get_backend(), world_size=2, rank=dist.get_rank())
    with pytest.raises(RuntimeError, match="exists already: its world_size is 2, got 5. Call destroy_process_group"):
        hp_platform.init_process_group(world_size=5)


@on_ranks(2)
def test_bad_ranks_are_named():
    groups = get_platform().groups
    with pytest.raises(ValueError, match=r"different ranks from 0 to 1 \(the world size is 2\), got \(0, 2\)"):
        groups.new_group([0, 2])
    with pytest.raises(ValueError, match=r"got \(1, 1\)"):
        groups.new_group([1, 1])
    with pytest.raises(ValueError, match=r"got \(\)"):
        groups.new_group([])
    with pytest.raises(ValueError, match=r"is not in the group \(\d,\): only members call new_group"):
        groups.new_group([1 - dist.get_rank()])
    with pytest.raises(ValueError, match="at least one list of ranks, got None"):
        hp_platform.split_group()
    with pytest.raises(ValueError, match=r"from 0 to 1 \(the parent has 2\), got \[\[0\], \[0, 1\]\]"):
        hp_platform.split_group(split_ranks=[[0], [0, 1]])
    with pytest.raises(ValueError, match=r"got \[\[\]\]"):
        hp_platform.split_group(split_ranks=[[]])


def test_without_a_default_group():
    groups = get_platform().groups
    for call in (groups.rank, groups.size, groups.ranks, groups.backend, get_platform().collectives.barrier):
        with pytest.raises(RuntimeError, match=r"no default process group: call init_process_group\(\) first"):
            call()


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


@on_ranks(4)
def test_members_may_be_in_different_numbers_of_groups():
    groups, collectives = get_platform().groups, get_platform().collectives
    rank = groups.rank()
    for members in ([1], [1, 2], [0, 1, 2], [2, 3], [0, 3], [0, 2]):
        if rank in members:
            group = groups.new_group(members)
            tensor = torch.full((1,), float(rank), device=device_type())
            collectives.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
            dist.all_reduce(tensor, group=group)  # torch knows the group, too
            assert dist.get_rank(group) == members.index(rank)
            assert dist.get_process_group_ranks(group) == members


def join_by_environment(port: int) -> tuple[int, bool]:
    """Leave the pool's default group for one of torchrun's environment."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = get_platform().groups
    before = groups.new_group([rank])
    hp_platform.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    hp_platform.init_process_group()
    tensor = torch.ones(1, device=device_type())
    get_platform().collectives.all_reduce(tensor, group=groups.new_group(range(size)))
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
