"""Offload to the host, communication by parameter, reshard to a smaller group, whole rows: the same results."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from fsdp_cells import (
    Net,
    batch,
    data_mesh,
    differentiated,
    double,
    gathered,
    groups_of,
    loss_of,
    pair,
    same_gradients,
    seeded,
    train,
)

from hp_dtensor import Shard, init_device_mesh
from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from hp_fsdp.mindspore.groups import bucket as bucket_module
from hp_fsdp.mindspore.groups.parameter import to_device, to_host
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("mindspore")


# ---- by parameter
@on_ranks(2, 3)
def test_communication_by_parameter():
    reference, model = pair(double(Net), comm_fusion=False)
    with count_collectives() as counts:
        differentiated(model)(batch(dtype=np.float64)[1])
    own, inside = len(list(model.first.get_parameters())) + len(list(model.last.get_parameters())), 3 * 3
    assert (counts["all_gather"], counts["reduce_scatter"]) == (own + 2 * inside, own + inside)
    train(reference, model)
    train(*pair(double(Net), comm_fusion=False, reshard_after_forward=False), steps=2)


# ---- a smaller group
@on_ranks(4)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 4))])
def test_reshard_to_a_smaller_group(size: int):
    train(*pair(double(Net), reshard_after_forward=size))
    policy = MixedPrecisionPolicy(mindspore.float32)
    train(*pair(double(Net), reshard_after_forward=size, mixed_precision=policy), steps=1, limit=1e-5)


@on_ranks(4)
def test_the_smaller_group_holds_shards_between_forward_and_backward():
    reference, model = pair(double(Net), reshard_after_forward=2)
    bucket = groups_of(model)[1].buckets[0]
    everything, own = batch(dtype=np.float64)
    seen: list[Any] = []

    def run(x):
        output = model(x)
        seen.append((bucket.post_forward_shard, gathered(model)[1]))
        return loss_of(output)

    model(own)
    assert bucket.post_forward_shard is None  # nothing follows
    with count_collectives() as counts:
        _, gradients = differentiated(model, run)(own)
    (shard, size), *rest = seen
    assert shard.numel() == 2 * bucket.layout.piece and size == 0 and not rest
    assert bucket.post_forward_shard is None and not any(gathered(model))
    assert dict(counts) == {"all_gather": 7, "reduce_scatter": 4}
    _, expected = differentiated(reference, dtensors=False)(everything)
    same_gradients(model, gradients, reference, expected, 1e-12)
    # A forward between, that begins after the shards were kept.
    both = differentiated(model, lambda x: run(x) + loss_of(model(x * 0.5)))(own)[1]
    expected = differentiated(reference, lambda x: loss_of(reference(x)) + loss_of(reference(x * 0.5)), dtensors=False)
    same_gradients(model, both, reference, expected(everything)[1], 1e-12)
    with pytest.raises(ValueError, match=r"reshard_after_forward=3 must divide the 4 ranks.*\[1, 2, 4\] do"):
        fully_shard(seeded(Net), data_mesh(), reshard_after_forward=3)


# ---- whole rows
def by_rows(parameter: Any) -> Shard | None:
    return Shard(0) if len(parameter.shape) == 2 else None


@on_ranks(3, thorough=(2,))
@pytest.mark.parametrize("deterministic", [True, False])
def test_whole_rows(deterministic: bool):
    reference, model = pair(double(Net), shard_placement_fn=by_rows, deterministic=deterministic)
    for parameter in model.trainable_params():
        if len(parameter.shape) == 2:
            units = parameter.placements[0].units
            assert all(unit % parameter.shape[1] == 0 for unit in units), (parameter.name, units)
    assert deterministic or min(model.first.weight.placements[0].units) > 0
    train(reference, model)


# ---- offload
@on_ranks(2, 4)
def test_offloaded_training(ranks: int):
    train(*pair(double(Net), offload_policy=CPUOffloadPolicy()), steps=2)
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    train(*pair(double(Net), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), steps=1)


def test_what_is_there_is_not_copied():
    class Elsewhere:
        device = "Ascend:0"

        def to(self, device: str) -> str:
            return f"a copy on {device}"

    here, there = mindspore.Tensor([1.0]), Elsewhere()
    assert to_host(here, True) is here and to_device(here) is here
    assert to_host(there, False) == to_device(there) == "a copy on CPU"  # type: ignore[arg-type]


@on_ranks(2)
def test_copies_to_and_from_the_device():
    """What Ascend does, with copies on the host for those between host and device."""
    reference, model = pair(double(Net), offload_policy=CPUOffloadPolicy())
    moved: dict[str, int] = {"to_device": 0, "to_host": 0}

    def counting(name: str):
        def move(tensor: Any, *pin: bool) -> Any:
            moved[name] += 1
            return tensor.copy()

        return move

    former = {name: getattr(bucket_module, name) for name in moved}
    buckets = [bucket for group in groups_of(model) for bucket in group.buckets]
    try:
        for name in moved:
            setattr(bucket_module, name, counting(name))
        for bucket in buckets:
            bucket.offload = CPUOffloadPolicy()
        train(reference, model, steps=2)
    finally:
        for name, function in former.items():
            setattr(bucket_module, name, function)
    assert min(moved.values()) >= 2 * len(model.trainable_params())
