"""Offload to the host, communication by parameter, reshard to a smaller group, whole rows: the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import Net, batch, close, data_mesh, groups_of, loss_of, pair, same_gradients, seeded, train
from torch import nn

from hp_dtensor import Replicate, Shard, init_device_mesh, init_empty_weights, init_parameters
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

OFFLOAD = CPUOffloadPolicy()


def local_devices(model: nn.Module) -> set[str]:
    return {tensor.to_local().device.type for p in model.parameters() for tensor in (p, p.grad) if tensor is not None}


# ---- offload
def trained(steps: int = 2, **options: Any) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Whole weights after some steps with accumulation and clipping."""
    model = pair(**options)[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(steps):
        for part in range(2):
            model.set_is_last_backward(part == 1)
            loss_of(model(batch(2 * step + part)[1])).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step < steps - 1:
            optimizer.zero_grad()
    return full_state_dict(model), model


@on_ranks(1, 3)
@pytest.mark.parametrize("pin", [True, False])
def test_offloaded_training_is_the_same(pin: bool):
    expected, _ = trained()
    state, model = trained(offload_policy=CPUOffloadPolicy(pin_memory=pin))
    assert local_devices(model) == {"cpu"}
    for name, tensor in state.items():
        close(tensor.cpu(), expected[name].cpu(), name, 1e-12)
    pinned = groups_of(model)[0].buckets[0].shard.is_pinned()
    assert pinned == (pin and device_type() != "cpu")


@on_ranks(2, 4)
def test_offload_with_mixed_precision_and_replicas(ranks: int):
    mesh = init_device_mesh(device_type(), (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(torch.float32, torch.float64)
    expected, _ = trained(mesh=mesh, mixed_precision=policy)
    state, _ = trained(mesh=mesh, mixed_precision=policy, offload_policy=OFFLOAD)
    for name, tensor in state.items():
        close(tensor.cpu(), expected[name].cpu(), name, 1e-12)


@on_ranks(2)
def test_offloaded_models_that_were_on_meta():
    expected = full_state_dict(seeded(Net), cpu=True)
    with init_empty_weights():
        model = Net().double()
    fully_shard(model, data_mesh(), offload_policy=OFFLOAD)
    model.to_empty(device="cpu")
    load_full_state_dict(model, expected)
    assert local_devices(model) == {"cpu"}
    for name, tensor in full_state_dict(model, cpu=True).items():
        close(tensor, expected[name], name, 0.0)
    assert model(batch()[1]).device.type == device_type()
    with init_empty_weights():
        model = fully_shard(Net(), data_mesh(), offload_policy=OFFLOAD)
    init_parameters(model)
    assert model(batch()[1].float()).device.type == device_type()
    assert local_devices(model) == {"cpu"}


@on_ranks(1)
def test_moving_an_offloaded_model():
    if device_type() == "cpu":
        return
    model = fully_shard(seeded(Net), data_mesh(), offload_policy=OFFLOAD)
    with pytest.raises(RuntimeError, match=r"with offload_policy=CPUOffloadPolicy\(\) sharded parameters stay on the"):
        model.to(device_type())


# ---- by parameter
@on_ranks(2, 3)
def test_communication_by_parameter(ranks: int):
    reference, model = pair(comm_fusion=False)
    with count_collectives() as counts:
        train(reference, model, steps=1)
    assert counts["reduce_scatter"] == len(list(model.parameters()))
    train(*pair(comm_fusion=False, reshard_after_forward=False))


class Skips(nn.Module):
    """One of two parameters, by the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.none = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return (self.two if rank else self.one)(x)


@on_ranks(2)
def test_a_parameter_without_gradients_on_some_ranks():
    reference, model = pair(Skips, comm_fusion=False)
    whole, own = batch()
    for rank, rows in enumerate(whole.chunk(2)):
        (loss_of(reference(rows, rank)) / 2).backward()
    loss_of(model(own, dist.get_rank())).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        whole_gradient = expected[name].grad
        units = parameter.placements[0].units
        start = sum(units[: dist.get_rank()])
        if whole_gradient is None:
            assert parameter.grad is None, name
        elif units[dist.get_rank()]:
            part = whole_gradient.reshape(-1)[start : start + units[dist.get_rank()]]
            close(parameter.grad.to_local(), part, name)


# ---- a smaller group
@on_ranks(4)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_reshard_to_a_smaller_group(size: int):
    train(*pair(reshard_after_forward=size))
    train(*pair(reshard_after_forward=size, mixed_precision=MixedPrecisionPolicy(torch.float32)), steps=1, limit=1e-5)


@on_ranks(4)
def test_the_smaller_group_holds_shards_between_forward_and_backward():
    reference, model = pair(reshard_after_forward=2)
    bucket = groups_of(model)[1].buckets[0]
    whole, own = batch()
    with torch.no_grad():
        model(own)
    assert bucket.post_forward_shard is None
    loss = loss_of(model(own))
    assert (
        bucket.post_forward_shard.numel() == 2 * bucket.layout.piece
        and not bucket.full_bytes == bucket.full_storage.nbytes()
    )
    loss_of(model(own))  # a forward in between
    loss.backward()
    assert bucket.post_forward_shard is None
    loss_of(reference(whole)).backward()
    same_gradients(model, reference)
    with pytest.raises(ValueError, match=r"reshard_after_forward=3 must divide the 4 ranks.*\[1, 2, 4\] do"):
        fully_shard(seeded(Net), data_mesh(), reshard_after_forward=3)


# ---- whole rows
def by_rows(parameter: nn.Parameter) -> Shard | None:
    return Shard(0) if parameter.dim() == 2 else None


@on_ranks(2, 3)
@pytest.mark.parametrize("deterministic", [True, False])
def test_whole_rows(deterministic: bool):
    _, model = pair(shard_placement_fn=by_rows, deterministic=deterministic)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            units = parameter.placements[0].units
            assert all(unit % parameter.shape[1] == 0 for unit in units), (name, units)
    assert model.first.weight.placements[0].units != (model.first.weight.numel(), 0) or deterministic
    train(*pair(shard_placement_fn=by_rows, deterministic=deterministic))


@on_ranks(1)
def test_placements_that_cannot_be():
    cases = [
        (lambda p: Replicate(), TypeError, r"must return a Shard or None, got Replicate\(\) for 'first.weight'"),
        (3, TypeError, "shard_placement_fn must be a function of a parameter, got int"),
    ]
    for function, error, text in cases:
        with pytest.raises(error, match=text):
            fully_shard(seeded(Net), data_mesh(), shard_placement_fn=function)  # type: ignore[arg-type]
