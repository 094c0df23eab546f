"""Nothing of a step waits for Python's collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_optim import AdamW, AdamW8bit, ChainedOptimizer, Muon, swap_optimizer
from hp_testing.leftovers import leftovers

pytestmark = pytest.mark.framework("torch")


def chained(model: nn.Module) -> Any:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    return ChainedOptimizer(model, {"muon": Muon(matrices), "adamw": AdamW(vectors)})


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: AdamW(model.parameters()),
    "adamw8bit": lambda model: AdamW8bit(model.parameters(), compiled=False),
    "chained": chained,
    "swapped": lambda model: swap_optimizer(AdamW(model.parameters())),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_leaves_nothing_to_the_collector(name: str) -> None:
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 2))
    optimizer = OPTIMIZERS[name](model)

    def step() -> None:
        model(torch.ones(3, 80)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()

    assert leftovers(step) == []
