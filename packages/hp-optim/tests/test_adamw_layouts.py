"""AdamW's bits for any layout, and its runs of memory under fully_shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_layouts import both, give, hsdp, lay_plain, mesh_of, ragged, ragged_groups, slices, tensor_parallel
from optim_models import Net, net
from torch import nn

from hp_dtensor import DTensor
from hp_fsdp import fully_shard
from hp_optim import AdamW
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [each for each in named if each[1].dim() > 1]},
        {"params": [each for each in named if each[1].dim() == 1], "weight_decay": 0.0},
    ]


def trained(lay: Callable[[Net], None], dtype: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    model = net(dtype).to(device_type())
    lay(model)
    optimizer = AdamW(groups(model), lr=0.02, **options)
    for step in range(10):
        give(model, step, dtype, ("last.weight",) if step == 4 else ())
        with count_collectives() as counts:
            optimizer.step()
        assert not dict(counts)
    return whole(model)


def check(lay: Callable[[Net], None]) -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        truth, made = trained(lay_plain, dtype), trained(lay, dtype)
        for name in truth:
            assert torch.equal(truth[name], made[name]), (name, dtype)


@pytest.mark.smoke
@on_ranks(2, 3)
@pytest.mark.parametrize("lay", [ragged, ragged_groups, slices, tensor_parallel])
def test_bits_do_not_depend_on_the_layout(lay: Callable[[Net], None]):
    check(lay)


@on_ranks(4)
@pytest.mark.parametrize("lay", [hsdp, both])
def test_bits_do_not_depend_on_two_axes(lay: Callable[[Net], None]):
    check(lay)


@on_ranks(2)
def test_a_group_of_fully_shard_is_one_run():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).to(device_type())
    fully_shard(model, mesh_of(2))
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 16, device=device_type())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer._blocks) == 1 and len(optimizer._blocks[0].runs.sizes) == 1


@on_ranks(2, 3)
@pytest.mark.parametrize("lay", [ragged, tensor_parallel])
def test_a_broken_gradient_on_one_rank_stops_all(lay: Callable[[Net], None], ranks: int):
    model = net(torch.float32)
    lay(model)
    optimizer = AdamW(model.named_parameters(), skip_nonfinite=True)
    for step in range(3):
        give(model, step, torch.float32)
        before = {name: value.clone() for name, value in whole(model).items()}
        gradient = model.last.weight.grad.to_local()  # type: ignore[union-attr]
        if step == 1 and dist.get_rank() == ranks - 1:
            assert gradient.numel()
            gradient.view(-1)[-1] = float("nan")
        with count_collectives() as counts, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert dict(counts) == {"all_reduce": 1 + (step == 1)}  # then all tell which
        texts = [str(each.message) for each in caught]
        assert len(texts) == (step == 1) and all("gradients of 'last.weight' have values" in text for text in texts)
        assert all(torch.equal(value, before[name]) for name, value in whole(model).items()) == (step == 1)
