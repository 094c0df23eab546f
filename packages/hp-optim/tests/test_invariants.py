"""One invariant of every optimizer and layout: ten steps give the weights of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_layouts import (
    both,
    expert_parallel,
    give,
    hsdp,
    lay_plain,
    ragged,
    ragged_groups,
    slices,
    tensor_parallel,
)
from optim_models import Net, net
from torch import nn

from hp_dtensor import DTensor
from hp_optim import AdamW, Muon, SwapOptimizerConfig, get_hyper_optimizer, swap_optimizer
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def matrices(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() > 1]


def hyper(model: nn.Module) -> Any:
    return get_hyper_optimizer(model, [name for name, _ in matrices(model)], ["*.bias"], {"lr": 0.03}, {"lr": 0.01})


def swapped(model: nn.Module) -> Any:
    optimizer = AdamW(model.named_parameters(), lr=0.02)
    return swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3, min_numel=8))


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw foreach": lambda model: AdamW(model.named_parameters(), lr=0.02, foreach=True),
    "adamw fused amsgrad": lambda model: AdamW(model.named_parameters(), lr=0.02, fused=True, amsgrad=True),
    "adamw swapped": swapped,
    "muon polar express": lambda model: Muon(matrices(model), ns_variant="polar_express", nesterov=False),
    "muon and adamw": hyper,
}


def trained(lay: Callable[[Net], None], name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = net(dtype).to(device_type())
    lay(model)
    optimizer = OPTIMIZERS[name](model)
    for step in range(10):
        give(model, step, dtype, ("last.weight",) if step == 4 else ())
        optimizer.step()
    return {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


def check(lay: Callable[[Net], None], name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        truth, result = trained(lay_plain, name, dtype), trained(lay, name, dtype)
        assert not torch.equal(truth["first.weight"], net(dtype).first.weight)
        for key in truth:
            assert torch.equal(truth[key], result[key]), (key, dtype, (truth[key] - result[key]).abs().max())


LAYOUTS = [ragged, ragged_groups, slices, tensor_parallel, expert_parallel]


@on_ranks(2)
@pytest.mark.parametrize(
    ("lay", "name"),
    [
        pytest.param(lay, name, marks=() if name == "muon and adamw" or at == row else pytest.mark.thorough)
        for at, lay in enumerate(LAYOUTS)
        for row, name in enumerate(OPTIMIZERS)
    ],
)
def test_bits_of_one_process_on_two_ranks(lay: Callable[[Net], None], name: str):
    check(lay, name)


@on_ranks(4)
@pytest.mark.parametrize(
    ("lay", "name"),
    [
        pytest.param(lay, name, marks=() if name == "muon and adamw" else pytest.mark.thorough)
        for lay in (ragged, hsdp, both)
        for name in OPTIMIZERS
    ],
)
def test_bits_of_one_process_on_four_ranks(lay: Callable[[Net], None], name: str):
    check(lay, name)
