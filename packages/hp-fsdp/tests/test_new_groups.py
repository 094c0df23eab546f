"""The process groups are destroyed and made anew under a sharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, compared, groups_of, loss_of, pair

import hp_platform
from hp_dtensor import init_device_mesh
from hp_fsdp import clip_grad_norm_
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


def renew(name: str, rank: int) -> None:
    backend, size = dist.get_backend(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    hp_platform.destroy_process_group()
    hp_platform.init_process_group(backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"replicas": True}])
def test_a_model_trains_on_with_the_new_groups(options):
    if options:
        mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    reference, model = pair(Net, **({"mesh": mesh} if options else {}))
    compared(model)
    loss_of(model(batch()[1])).backward()
    former = [group.axes.shard_group for group in groups_of(model)]  # kept: a freed address would be used again
    renew(f"model {len(options)}", dist.get_rank())
    model.zero_grad()
    reference.zero_grad()
    loss_of(model(batch()[1])).backward()
    loss_of(reference(batch()[0])).backward()
    assert all(group.axes.shard_group not in former for group in groups_of(model))
    assert torch.allclose(
        clip_grad_norm_(model.parameters(), 1.0), torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    )


@on_ranks(2)
def test_shards_of_another_place_are_refused():
    _, model = pair()
    compared(model)
    rank = dist.get_rank()
    renew("model swapped", 1 - rank)
    try:
        with pytest.raises(RuntimeError, match=rf"had index {rank} on the shard axis .* has index {1 - rank} since"):
            model(batch()[1])
    finally:
        renew("model back", rank)


@on_ranks(2)
@pytest.mark.framework("torch")
def test_a_new_model_does_not_wait_for_the_reductions_of_one_whose_groups_are_lost():
    from hp_dtensor.torch.extend import arriving_gradients
    from hp_fsdp.torch.extend import drop_reductions

    def sharded():
        mesh = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        return pair(Net, mesh=mesh)

    _, lost = sharded()
    lost.set_is_last_backward(False)
    loss_of(lost(batch()[1])).backward()
    assert arriving_gradients
    drop_reductions()
    assert not arriving_gradients
    renew("lost model", dist.get_rank())
    reference, model = sharded()
    loss_of(model(batch()[1])).backward()
    loss_of(reference(batch()[0])).backward()
    norms = [torch.nn.utils.clip_grad_norm_, clip_grad_norm_]
    whole, own = (norm(each.parameters(), 1.0) for norm, each in zip(norms, (reference, model)))
    assert torch.allclose(own, whole)
