"""Norms and clipping of gradients of several dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_fsdp import clip_grad_norm_, fully_shard, global_grad_norm
from hp_fsdp.torch import port
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def leaf(values: list[float], dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_gradient_is_scaled_in_its_own_dtype(dtype: torch.dtype, foreach: bool | None):
    small, exact = leaf([3.0], torch.bfloat16), leaf([4.0, 1.1], dtype)
    assert small.grad is not None and exact.grad is not None
    expected = exact.grad * (1.0 / (9 + 16 + 1.21) ** 0.5)
    norm = clip_grad_norm_([small, exact], 1.0, foreach=foreach)
    assert norm.dtype == dtype
    torch.testing.assert_close(exact.grad, expected, rtol=1e-6, atol=0)
    assert small.grad.dtype == torch.bfloat16


def test_gradients_on_the_host_and_on_a_device_have_one_norm():
    """On tensors without memory, as there is one kind of device here; a norm that is mixed has none."""
    with FakeTensorMode():
        on_host, on_device = torch.empty(3), torch.empty(4, device="cuda")
        for gradients in ([on_host, on_device], [on_device, on_host]):
            norm = port.power_sum(gradients, 2.0, torch.float32, [(each, each) for each in gradients], None)
            assert norm.device == gradients[0].device
            port.scale(gradients, norm, 1.0, None)


def test_orders_that_are_no_norm_are_refused():
    for order in (-1.0, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"norm_type must be 0, a positive number or inf, got {order}"):
            clip_grad_norm_([leaf([1.0], torch.float32)], 1.0, norm_type=order)


@on_ranks(2)
@pytest.mark.parametrize("placements", [None, [Shard(0)], [Shard(1)], [Replicate()]])
def test_a_norm_of_order_zero_counts_gradients_as_torchs_does(placements: Any) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    last_row = torch.zeros(3, 4)
    last_row[2] = 1.0  # the other rank's shard is zero
    listed, truth = [], []
    for gradient in (torch.ones(3, 4), torch.zeros(3, 4), last_row, torch.full((3, 4), 7.0)):
        parameter = nn.Parameter(torch.zeros(3, 4))
        parameter.grad = gradient.clone()
        truth.append(parameter)
        own: Any = torch.zeros(3, 4, device=device_type())
        value: Any = gradient.to(device_type())
        if placements is not None:
            own, value = distribute_tensor(own, mesh, placements), distribute_tensor(value, mesh, placements)
        listed.append(nn.Parameter(own))
        listed[-1].grad = value.clone()
    listed.append(nn.Parameter(torch.zeros(2, device=device_type())))  # without a gradient
    norm = clip_grad_norm_(listed, 1.5, norm_type=0.0)
    assert norm.item() == nn.utils.clip_grad_norm_(truth, 1.5, norm_type=0.0).item() == 3.0
    for parameter, other in zip(listed, truth):
        whole = parameter.grad.full_tensor() if placements is not None else parameter.grad
        torch.testing.assert_close(whole.cpu(), other.grad)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))
        self.many = nn.Parameter(torch.arange(1.0, 7.0))

    def forward(self, with_one: bool) -> torch.Tensor:
        total = (self.many * self.many).sum().double() / 2
        return total + (self.one * self.one).sum() / 2 if with_one else total


@on_ranks(2)
def test_ranks_that_have_gradients_of_other_dtypes_agree():
    """The rank that owns nothing of the float64 parameter, and does not use it, has no gradient for it."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(TwoDtypes(), mesh)
    one: Any = model.one
    owns = one.to_local().numel() == 1
    model(owns).backward()
    assert (one.grad is not None) == owns
    norm = global_grad_norm(model.parameters())
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm.item(), (1.5**2 + sum(n * n for n in range(1, 7))) ** 0.5, rtol=1e-6, atol=0)


@on_ranks(2)
def test_the_ranks_of_a_group_add_what_each_has() -> None:
    rank = dist.get_rank()
    own, shared = leaf([3.0, 4.0 * rank], torch.float32), leaf([12.0], torch.float64)
    options: Any = {"group": dist.group.WORLD, "copies": [shared] if rank else []}
    norm = clip_grad_norm_([own, shared], 1.0, **options)
    torch.testing.assert_close(norm.item(), (9.0 + 9 + 16 + 144) ** 0.5, rtol=1e-6, atol=0)
    assert norm.dtype == torch.float64
    assert shared.grad is not None
    torch.testing.assert_close(shared.grad.item(), 12 / norm.item(), rtol=1e-6, atol=0)


@on_ranks(2)
def test_ranks_of_a_group_that_disagree() -> None:
    rank = dist.get_rank()
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    text = "rank 0: clip_grad_norm_ with norm_type=2.0, max_norm=1.0; rank 1: clip_grad_norm_ with .*, max_norm=2.0"
    with pytest.raises(ValueError, match=text):
        clip_grad_norm_([weight], 1.0 + rank, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="rank 1: global_grad_norm with norm_type=1.0"):
        global_grad_norm([weight], 2.0 - rank, group=dist.group.WORLD)
    assert weight.grad.tolist() == [1, 1]
    with pytest.raises(ValueError, match="copies= are counted by another rank of a group; pass that group, got None"):
        global_grad_norm([weight], copies=[weight])
    weight.data = weight.data.to([torch.float32, torch.float64][rank])
    assert global_grad_norm([], group=dist.group.WORLD).tolist() == 0
    weight.grad = None
    weight.grad = torch.full((2,), float("nan") if rank else 1.0, dtype=weight.dtype)
    norm = global_grad_norm([weight], float("inf"), group=dist.group.WORLD)
    assert norm.isnan() and norm.dtype is torch.float64


@on_ranks(1)
def test_parameters_of_torchs_fully_shard_are_refused() -> None:
    module = torch_fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh(device_type(), (1,)))
    with pytest.raises(TypeError, match="global_grad_norm: expected plain parameters or DTensors of hp-dtensor"):
        global_grad_norm(module.parameters())
