"""The check that finds what steps leave behind."""

from __future__ import annotations

import pytest
import torch

from hp_testing.leftovers import leftovers

pytestmark = pytest.mark.framework("torch")


def cycle(of: object) -> None:
    own = [of]
    own.append(own)


def test_what_a_step_leaves_is_told():
    kept: list[torch.Tensor] = []
    assert leftovers(lambda: torch.ones(2)) == []
    found = leftovers(lambda: cycle(torch.nn.Linear(2, 2)))
    assert "4 torch.nn.modules.linear.Linear in cycles" in found and "8 torch.nn.parameter.Parameter in cycles" in found
    (growing,) = leftovers(lambda: kept.append(torch.nn.Parameter(torch.ones(2))))
    assert growing.startswith("more live tensors after each step: [")


def test_what_was_there_before_is_not():
    held = [torch.nn.Linear(2, 2)]
    held.append(held)  # type: ignore[arg-type]
    holders = [held]
    del held
    runs = iter(range(10))

    def step() -> None:
        if next(runs) == 2:
            holders.clear()

    assert leftovers(step) == []
