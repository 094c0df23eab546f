"""Dtypes of computation, reduction and outputs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from fsdp_models import Net, batch, close, data_mesh, groups_of, loss_of, pair, seeded
from torch import nn

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


class Seen(Net):
    """Remembers dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.first.weight.dtype)
        return super().forward(x)


@pytest.mark.smoke
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("sync", [True, False])
def test_computes_low_and_reduces_high(sync: bool):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = seeded(Seen)
    low = copy.deepcopy(model).float()
    for block in model.blocks:
        fully_shard(block, data_mesh(), mixed_precision=policy)
    fully_shard(model, data_mesh(), mp_policy=dataclasses.replace(policy, output_dtype=torch.float64))
    for step in range(2):
        whole, own = batch(step)
        output = model(own)
        assert output.dtype is torch.float64 and model.seen == (torch.float32,) * 2
        model.set_requires_gradient_sync(sync or step == 1)
        loss_of(output).backward()
        loss_of(low(whole.float()).double()).backward()
    for (name, parameter), expected in zip(model.named_parameters(), low.parameters()):
        assert parameter.dtype is torch.float64 and parameter.grad.dtype is torch.float64
        close(parameter.grad.full_tensor(), expected.grad.double(), name, 1e-5)


@on_ranks(2)
def test_reduces_in_the_dtype_of_computation_by_default():
    _, model = pair(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    output = model(batch()[1])
    assert output.dtype is torch.bfloat16
    output.float().mean().backward()
    grad = model.last.bias.grad
    assert grad.dtype is torch.float64
    assert torch.equal(grad.full_tensor(), grad.full_tensor().bfloat16().double())


@on_ranks(2)
def test_inputs_are_cast_only_if_wanted():
    model = seeded(lambda: nn.Linear(5, 3), torch.float32)
    fully_shard(
        model, data_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    )
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 5, device=device_type()))
    assert model(torch.ones(2, 5, device=device_type(), dtype=torch.bfloat16)).dtype is torch.bfloat16


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 4)
        self.two = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).to(self.two.weight.dtype)).double()


@on_ranks(2)
def test_parameters_of_several_dtypes_in_one_group():
    reference = seeded(Mixed)
    reference.two.float()
    model = fully_shard(copy.deepcopy(reference), data_mesh())
    whole, own = batch()
    loss_of(reference(whole)).backward()
    loss_of(model(own)).backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters()):
        assert parameter.dtype is expected.dtype
        close(parameter.grad.full_tensor(), expected.grad, name, 1e-6)


@on_ranks(2)
def test_torchs_policies_are_taken():
    from torch.distributed import fsdp as torchs

    model = fully_shard(
        Net().to(device_type()),
        data_mesh(),
        mp_policy=torchs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        offload_policy=torchs.CPUOffloadPolicy(pin_memory=False),
    )
    output = model(batch()[1].float())
    assert output.dtype is torch.float32
    assert {p.to_local().device.type for p in model.parameters()} == {"cpu"}
    (group,) = groups_of(model)
    assert [bucket.compute_dtype for bucket in group.buckets] == [torch.bfloat16]
