"""Process groups: one for each set of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hp_platform
from hp_platform import get_platform
from hp_platform.extend import own_rank
from hp_testing import as_array, as_tensor, on_ranks

pytestmark = pytest.mark.device


@on_ranks(1, 2, 3, 4)
def test_the_group_of_all_ranks_is_the_default_one(ranks):
    groups = get_platform().groups
    world = groups.new_group(range(ranks))
    assert groups.ranks() == groups.ranks(world) == list(range(ranks))
    assert groups.size() == groups.size(world) == ranks
    assert groups.rank() == groups.rank(world) == own_rank()
    assert groups.backend() == groups.backend(world)


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
    total = as_tensor(np.full(2, float(rank)))
    get_platform().collectives.all_reduce(total, group=group)
    assert as_array(total).tolist() == [sum(range(1, ranks))] * 2


@on_ranks(4)
def test_split_group_gives_each_rank_its_child():
    rank = get_platform().groups.rank()
    child = hp_platform.split_group(split_ranks=[[0, 2], [1, 3]])
    assert hp_platform.get_process_group_ranks(child) == [rank % 2, rank % 2 + 2]
    assert hp_platform.split_group(split_ranks=[[2, 0], [3, 1]]) is child
    assert get_platform().groups.new_group([rank % 2, rank % 2 + 2]) is child
    # ranks of a child's child are ranks inside the parent
    grandchild = hp_platform.split_group(child, [[1]])
    assert (grandchild is None) == (rank < 2)
    if grandchild is not None:
        assert hp_platform.get_process_group_ranks(grandchild) == [rank]


@on_ranks(4)
def test_split_group_takes_every_form_of_torch():
    rank, world = get_platform().groups.rank(), hp_platform.split_group(None, 4)
    pairs = hp_platform.split_group(world, 2)
    first = rank - rank % 2
    assert hp_platform.get_process_group_ranks(pairs) == [first, first + 1]
    listed = [[0, 1], (2, 3)]
    backend = hp_platform.get_backend()
    assert hp_platform.split_group(parent_pg=world, split_ranks=listed, backend=backend) is pairs
    assert hp_platform.split_group(world, [range(2), range(2, 4)], None, None, "pairs", backend.upper()) is pairs
    assert hp_platform.get_process_group_ranks(hp_platform.split_group(pairs, split_ranks=1)) == [rank]
    with pytest.raises(ValueError, match=r"split_ranks=3 is the size of each child and must .* list the ranks of each"):
        hp_platform.split_group(world, 3)
    unequal = hp_platform.split_group(world, [[0], [1, 2, 3]])
    assert hp_platform.get_process_group_ranks(unequal) == ([1, 2, 3] if rank else [0])
    with pytest.raises(ValueError, match="split_ranks=0 is the size"):
        hp_platform.split_group(world, 0)
    with pytest.raises(TypeError, match=r"such as \[\[0, 1\], \[2, 3\]\], or the size of a child, got \[0, 1\]"):
        hp_platform.split_group(world, [0, 1])
    with pytest.raises(ValueError, match=f"backend='mpi', but a child has the backend of its parent, '{backend}'"):
        hp_platform.split_group(world, 2, backend="mpi")
    assert hp_platform.split_group(world, 2) is pairs
    with pytest.raises(ValueError, match="are the same argument: pass only one"):
        hp_platform.split_group(world, 2, parent_pg=pairs)
    assert hp_platform.split_group(split_ranks=2, parent_pg=world) is pairs


@on_ranks(2)
def test_a_destroyed_group_is_made_anew():
    groups = get_platform().groups
    rank = groups.rank()
    before = groups.new_group([rank])
    hp_platform.destroy_process_group(before)
    after = groups.new_group([rank])
    assert after is not before
    get_platform().collectives.all_reduce(as_tensor([1.0]), group=after)


@on_ranks(3)
def test_a_shared_group_is_destroyed_and_made_anew():
    if get_platform().groups.rank() == 2:
        return
    groups = get_platform().groups
    for _ in range(3):
        group = groups.new_group([0, 1])
        tensor = as_tensor([1.0])
        get_platform().collectives.all_reduce(tensor, group=group)
        assert as_array(tensor).item() == 2
        groups.destroy(group)


@on_ranks(2)
def test_init_again():
    hp_platform.init_process_group()
    groups = get_platform().groups
    hp_platform.init_process_group(groups.backend(), world_size=2, rank=groups.rank())
    first = "Restart the ranks with these" if groups.backend() == "mccl" else r"Call destroy_process_group\(\) first"
    with pytest.raises(RuntimeError, match=f"its world_size is 2, got 5. {first}, or leave the arguments out"):
        hp_platform.init_process_group(world_size=5)


@on_ranks(2)
def test_bad_ranks_are_named():
    groups = get_platform().groups
    with pytest.raises(ValueError, match=r"unique ranks from 0 to 1 \(the world size is 2\), got \(0, 2\)"):
        groups.new_group([0, 2])
    with pytest.raises(ValueError, match=r"got \(1, 1\)"):
        groups.new_group([1, 1])
    with pytest.raises(ValueError, match=r"got \(\)"):
        groups.new_group([])
    with pytest.raises(ValueError, match=r"is not in the group \(\d,\): only its members may call new_group"):
        groups.new_group([1 - groups.rank()])
    with pytest.raises(ValueError, match="at least one list of ranks, got None"):
        hp_platform.split_group()
    with pytest.raises(ValueError, match=r"from 0 to 1 \(the parent has 2\), got \[\[0\], \[0, 1\]\]"):
        hp_platform.split_group(split_ranks=[[0], [0, 1]])
    with pytest.raises(ValueError, match=r"got \[\[\]\]"):
        hp_platform.split_group(split_ranks=[[]])


def test_without_a_default_group():
    assert own_rank() == 0
    groups = get_platform().groups
    for call in (groups.rank, groups.size, groups.ranks, groups.backend, get_platform().collectives.barrier):
        with pytest.raises(RuntimeError, match=r"no default process group: call init_process_group\(\) first"):
            call()


@on_ranks(4)
def test_members_may_be_in_different_numbers_of_groups():
    groups, collectives = get_platform().groups, get_platform().collectives
    rank = groups.rank()
    for members in ([1], [1, 2], [0, 1, 2], [2, 3], [0, 3], [0, 2]):
        if rank in members:
            group = groups.new_group(members)
            tensor = as_tensor([float(rank)])
            collectives.all_reduce(tensor, group=group)
            assert as_array(tensor).item() == sum(members)
            assert groups.rank(group) == members.index(rank)
            assert groups.ranks(group) == members
