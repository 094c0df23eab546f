"""The default process group is destroyed and made anew: what held the old groups asks for new ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hp_platform
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device

_numbers = itertools.count()


def renew(how: str) -> None:
    """Destroys all groups and makes the default one again, by this library or by torch."""
    module = {"ours": hp_platform, "torch": dist}[how]
    backend, rank, size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    prefixed = dist.PrefixStore(f"again {next(_numbers)}", store)
    module.destroy_process_group()
    module.init_process_group(backend, store=prefixed, rank=rank, world_size=size)


@on_ranks(2)
@pytest.mark.parametrize("how", ["ours", "torch"])
def test_tensors_and_meshes_use_the_new_groups(how):
    kind = device_type()
    whole = torch.arange(8.0, device=kind)
    former = init_device_mesh(kind, (2,), mesh_dim_names=("dp",))
    sharded: Any = distribute_tensor(whole, former, [Shard(0)])
    old_groups = [former.get_group()]
    total = (sharded * 2).redistribute(former, [Replicate()]).to_local()
    renew(how)
    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("dp",))
    again: Any = distribute_tensor(whole, mesh, [Shard(0)])
    new = again.device_mesh.get_group()
    assert new not in old_groups and dist.get_process_group_ranks(new) == [0, 1]
    assert former.get_group() is mesh.get_group() is new
    assert torch.equal((again * 2).redistribute(mesh, [Replicate()]).to_local(), total)
    assert torch.equal((sharded * 2).redistribute(former, [Replicate()]).to_local(), total)
    assert torch.equal((sharded + again).full_tensor(), total)
    # A move that was never prepared asks in which order the groups' ranks are.
    square = distribute_tensor(torch.eye(4, device=kind), mesh, [Shard(1)])
    assert torch.equal(square.redistribute(mesh, [Shard(0)]).full_tensor(), torch.eye(4, device=kind))


@on_ranks(2)
def test_a_destroyed_group_of_an_axis_is_made_again():
    kind = device_type()
    mesh = init_device_mesh(kind, (2, 1), mesh_dim_names=("dp", "tp"))
    alone = mesh.get_group("tp")
    hp_platform.destroy_process_group(alone)
    assert mesh.get_group("tp") is not alone
    assert mesh.get_group("tp").size() == 1


@on_ranks(2)
def test_another_rank_gives_another_place():
    kind = device_type()
    backend, rank = dist.get_backend(), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    mesh = init_device_mesh(kind, (2,))
    mine = distribute_tensor(torch.arange(3.0, device=kind), mesh, [Shard(0)]).to_local()
    assert mine.tolist() == np.array_split(np.arange(3.0), 2)[rank].tolist()
    for name, place in (("swapped", 1 - rank), ("back", rank)):
        hp_platform.destroy_process_group()
        hp_platform.init_process_group(backend, store=dist.PrefixStore(name, store), rank=place, world_size=2)
        mesh = init_device_mesh(kind, (2,))
        cut = distribute_tensor(torch.arange(3.0, device=kind), mesh, [Shard(0)])
        assert isinstance(cut, DTensor)
        assert cut.to_local().tolist() == np.array_split(np.arange(3.0), 2)[place].tolist()
        assert cut.full_tensor().tolist() == [0.0, 1.0, 2.0]
