"""Writes in place to the outputs and inputs of sharded modules, and losses that are made of no output."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hp_fsdp import fully_shard
from hp_testing import on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from fsdp_models import data_mesh, pair, rows, same_gradients, seeded

pytestmark = pytest.mark.device

Write = Callable[[torch.Tensor], torch.Tensor]


def first_half(y: torch.Tensor) -> torch.Tensor:
    y[..., :2] = y[..., 2:4]
    return y


WRITES: dict[str, Write] = {
    "div_": lambda y: y.div_(0.7),
    "mul_ of a slice": lambda y: (y[..., 0].mul_(2.0), y)[1],
    "add_ to a transpose": lambda y: (y.transpose(-1, -2).add_(1.0), y)[1],
    "assignment": first_half,
    "relu_": lambda y: y.relu_(),
    "relu_ of a view": lambda y: y.view(-1).relu_().view(y.shape),
    "masked_fill_": lambda y: y.masked_fill_(y > 1.0, 0.5),
    "twice": lambda y: y.mul_(1.5).add_(0.25),
    "+= of itself": lambda y: y.add_(y.detach()),
}


class Tokens(nn.Module):
    """The last layer has a bias and an input of three dims, so its output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 6)
        self.between: Write = lambda y: y

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


def token_ids() -> torch.Tensor:
    from hp_testing import device_type

    return (torch.arange(24 * 3).view(24, 3) * 7 % 16).to(device_type())


def scaled(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype, device=y.device)).sin().mean()


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False, None])
def test_a_write_to_a_models_output_keeps_every_gradient(reshard):
    for name, write in WRITES.items():
        reference, model = pair(Tokens, **({} if reshard is None else {"reshard_after_forward": reshard}))
        for step in range(2):
            scaled(write(reference(token_ids()))).backward()
            scaled(write(model(rows(token_ids())))).backward()
            try:
                same_gradients(model, reference)
            except AssertionError as error:
                raise AssertionError(f"{name}, step {step}") from error


@on_ranks(2)
def test_a_write_to_a_blocks_output_keeps_every_gradient():
    for name, write in WRITES.items():
        for reshard in (True, False):
            reference, model = pair(Tokens, reshard_after_forward=reshard)
            reference.between = model.between = write
            scaled(reference(token_ids())).backward()
            scaled(model(rows(token_ids()))).backward()
            try:
                same_gradients(model, reference)
            except AssertionError as error:
                raise AssertionError(f"{name}, reshard_after_forward={reshard}") from error


class AddsToInput(nn.Module):
    """It writes its input, and returns what it is told to."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        x.add_(self.linear(x.clone()).tanh())
        return x if self.returns else None


class Residual(nn.Module):
    def __init__(self, returns: bool = False, into_buffer: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([AddsToInput(returns), AddsToInput(returns)])
        self.into_buffer = into_buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ones(x.shape[0], 8, dtype=x.dtype, device=x.device) if self.into_buffer else self.first(x)
        for block in self.blocks:
            block(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("into_buffer", [True, False])
def test_an_input_that_a_block_writes_in_place_carries_its_gradients(returns, into_buffer):
    whole = torch.randn(24, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference, model = pair(lambda: Residual(returns, into_buffer))
    scaled(reference(whole.to(next(reference.parameters()).device))).backward()
    scaled(model(rows(whole).to(next(reference.parameters()).device))).backward()
    same_gradients(model, reference)


class Inner(nn.Module):
    """It keeps an activation of its own, which its output need not pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 8)
        self.kept: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.kept = self.embed(ids)
        return self.up(self.kept)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_that_come_past_the_outputs_are_reduced(reshard):
    reference = seeded(Inner)
    model = fully_shard(copy.deepcopy(reference), data_mesh(), reshard_after_forward=reshard)
    for _ in range(2):
        reference(token_ids())
        scaled(reference.kept).backward()
        model(rows(token_ids()))
        scaled(model.kept).backward()  # of the embedding alone, whose backward needs no weight
        same_gradients(model, reference)


@on_ranks(2)
def test_a_backward_that_needs_a_freed_parameter_raises():
    model = fully_shard(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), data_mesh())
    model.set_reshard_after_forward(True)
    kept = []
    model[0].register_forward_hook(lambda module, inputs, output: kept.append(output))
    x = torch.randn(4, 8, dtype=torch.float64, device=next(model.parameters()).device, requires_grad=True)
    model(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled(kept[0]).backward()


class Penalized(nn.Module):
    """A penalty of a block's own parameter is kept aside, and the block's output may go no further."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.block.register_forward_hook(lambda module, inputs, output: self.keep(module))
        self.penalty: torch.Tensor | None = None

    def keep(self, block: nn.Linear) -> None:
        self.penalty = block.bias.sum() * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.first(x)).detach())


@on_ranks(2)
def test_a_loss_of_a_modules_own_parameters_is_reduced_or_refused():
    whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference = seeded(Penalized)
    model = seeded(Penalized)
    for module in (model.first, model.block, model.head, model):
        fully_shard(module, data_mesh(), reshard_after_forward=False)
    for net, x in ((reference, whole), (model, rows(whole))):
        out = net(x.to(next(reference.parameters()).device))
        (scaled(out) + net.penalty).backward()
    same_gradients(model, reference)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    model(rows(whole).to(next(reference.parameters()).device))
    model.penalty.backward()
    with pytest.raises(RuntimeError, match=r"parameters of .*block.* got gradients in a backward pass that came"):
        optimizer.step()
