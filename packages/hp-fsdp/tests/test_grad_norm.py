"""Norms and clipping of gradients of several dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import init_device_mesh
from hp_fsdp import clip_grad_norm_, fully_shard, global_grad_norm
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
