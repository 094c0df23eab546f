"""Ranks whose Muon differs: refused on all of them, before a weight changes, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_layouts import mesh_of
from torch import nn

from hp_fsdp import fully_shard
from hp_optim import AdamW, Muon
from hp_platform import count_collectives
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")
Change = Callable[[Any, Any], None]


def made(parts: int = 1) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    fully_shard(model, mesh_of(2))
    named = list(model.named_parameters())
    groups = [{"params": named[:2]}, {"params": named[2:]}] if parts == 2 else [{"params": named}]
    return model, Muon(groups)


def give(model: Any) -> None:
    model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()


def frozen(model: Any, optimizer: Any) -> None:
    model[2].weight.requires_grad_(False)


def frozen_all(model: Any, optimizer: Any) -> None:
    model.requires_grad_(False)


def other_steps(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["ns_steps"] = 7


def wrong_steps(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["ns_steps"] = -1


def wrong_momentum(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = "x"


def other_lr(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def tensor_lr(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def sparse(model: Any, optimizer: Any) -> None:
    weight = model[1].weight
    weight.grad = None
    with torch._C.DisableTorchFunctionSubclass():
        weight.grad = torch.zeros_like(weight).to_sparse()


def wrong_state(model: Any, optimizer: Any) -> None:
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = torch.ones(3)


def fewer(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


CHANGES: dict[Change, tuple[type[Exception], str]] = {
    frozen: (ValueError, r"ranks have different parameters or settings.*'2.weight' of shape \(8, 8\)"),
    frozen_all: (ValueError, r"ranks have different parameters or settings.*'0.weight' of shape \(8, 8\)"),
    other_steps: (ValueError, r"ranks have different parameters or settings.*'0.weight' of shape \(8, 8\)"),
    wrong_steps: (ValueError, r"ns_steps must be .* got -1"),
    wrong_momentum: (TypeError, r"Muon: momentum must be a number, got 'x'"),
    other_lr: (ValueError, r"group 0 with lr=(0.5, .* lr=0.02|0.02, .* lr=0.5)"),
    tensor_lr: (ValueError, r"group 0 with lr=(0.5, .* lr=0.02|0.02, .* lr=0.5)"),
    sparse: (RuntimeError, r"Muon: the gradient of '1.weight' is sparse"),
    wrong_state: ((ValueError, RuntimeError), r"'0.weight' has shape .*\(3,\)"),  # type: ignore[dict-item]
    fewer: (ValueError, r"ranks have different parameters or settings.*'2.weight' of shape \(8, 8\)"),
}


@on_ranks(2)
@pytest.mark.parametrize("first", [False, True], ids=["after a step", "at the first step"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_what_one_rank_changes_all_ranks_refuse(change: Change, first: bool):
    model, optimizer = made()
    give(model)
    if not first:
        optimizer.step()
        give(model)
    before = [each.to_local().clone() for each in model.parameters()]
    momenta = [optimizer.state[each]["momentum_buffer"].to_local().clone() for each in model.parameters()]
    gradients = [each.grad for each in model.parameters()]
    if dist.get_rank() == 1:
        change(model, optimizer)
    error, text = CHANGES[change]
    with pytest.raises(error, match=text):
        optimizer.step()
    for each, weight in zip(model.parameters(), before):
        assert torch.equal(each.to_local(), weight)
    if change not in (wrong_state, fewer):  # what is put right goes on
        if dist.get_rank() == 1:
            model.requires_grad_(True)
            optimizer.param_groups[0].update(lr=0.02, momentum=0.95, ns_steps=5)
            for each, gradient in zip(model.parameters(), gradients):
                each.grad = gradient
        for each, momentum in zip(model.parameters(), momenta):
            assert torch.equal(optimizer.state[each]["momentum_buffer"].to_local(), momentum)
        optimizer.step()
        for each, weight in zip(model.parameters(), before):
            assert not weight.numel() or not torch.equal(each.to_local(), weight)


@on_ranks(2)
def test_what_all_ranks_change_they_agree_on_and_go_on():
    model, optimizer = made(2)
    truth, reference = made(2)
    for step in range(8):
        for each, own in ((model, optimizer), (truth, reference)):
            if step >= 2:
                own.param_groups[0].update(ns_steps=4, lr=0.05)
            each[1].weight.requires_grad_(step not in (3, 4))
        if step == 5:  # a scheduler that replaces groups: the numbers are what counts
            optimizer.param_groups[1] = dict(optimizer.param_groups[1])
        if step == 6:
            reference._plan = None
        give(model), give(truth)
        with count_collectives() as counts:
            optimizer.step()
        expected = {0: {"all_gather": 1, "all_to_all": 2}, 2: {"all_gather": 1, "all_to_all": 4}}
        expected |= {3: expected[2], 5: expected[2]}
        assert dict(counts) == expected.get(step, {"all_to_all": 2}), step
        reference.step()
    for mine, other in zip(model.parameters(), truth.parameters()):
        assert torch.equal(mine.to_local(), other.to_local())


@on_ranks(2)
def test_learning_rates_that_differ_in_the_last_bits_are_the_same():
    """Processors of different kinds round otherwise."""
    model, optimizer = made()
    give(model)
    optimizer.param_groups[0]["lr"] = 0.02 * (1 + dist.get_rank() * 2.0**-50)
    optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("change", [other_lr, sparse, fewer], ids=lambda each: each.__name__)
def test_adamw_that_looks_for_broken_gradients_tells_all_ranks_too(change: Change):
    model, _ = made()
    optimizer = AdamW(model.named_parameters(), lr=0.02, skip_nonfinite=True)
    give(model)
    optimizer.step()
    give(model)
    before = [each.to_local().clone() for each in model.parameters()]
    if dist.get_rank() == 1:
        change(model, optimizer)
    texts = {
        other_lr: r"AdamW: ranks have different .*group 0 with lr=(0.5, .* lr=0.02|0.02, .* lr=0.5)",
        sparse: r"AdamW: the gradient of '1.weight' is sparse",
        fewer: r"AdamW: ranks have different parameters or settings.*'2.weight' of shape",
    }
    with pytest.raises((ValueError, RuntimeError), match=texts[change]):
        optimizer.step()
    for each, weight in zip(model.parameters(), before):
        assert torch.equal(each.to_local(), weight)
