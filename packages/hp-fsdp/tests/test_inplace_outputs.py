"""Writes in place to the outputs and inputs of sharded modules, and losses that are made of no output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_models import data_mesh, pair, rows, same_gradients, seeded
from torch import nn

from hp_fsdp import fully_shard
from hp_platform import count_collectives
from hp_testing import on_ranks

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


class Kept(nn.Module):
    """Blocks in groups of their own, of which hooks keep what is inside."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(depth)])
        self.kept: list[torch.Tensor] = []
        for block in self.blocks:
            block[1].register_forward_hook(lambda module, inputs, output: self.kept.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
        return x


def kept_pair(reshard: bool = True):
    reference = seeded(Kept)
    model = copy.deepcopy(reference)
    model.kept = []
    for block in model.blocks:
        block[1]._forward_hooks.clear()
        block[1].register_forward_hook(lambda module, inputs, output: model.kept.append(output))
        fully_shard(block, data_mesh(), reshard_after_forward=reshard)
    return reference, fully_shard(model, data_mesh(), reshard_after_forward=reshard)


INNER = {
    "last": lambda out, kept: scaled(kept[-1]),
    "first": lambda out, kept: scaled(kept[0]),
    "middle, and the output": lambda out, kept: scaled(kept[1]) + scaled(out.square()),
    "two": lambda out, kept: scaled(kept[0]) + scaled(kept[2].square()),
}


@on_ranks(2)
@pytest.mark.parametrize("loss", INNER)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_loss_of_what_is_inside_a_block_has_every_gradient(loss, reshard):
    whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference, model = kept_pair(reshard)
    for _ in range(2):
        for net, x in ((reference, whole), (model, rows(whole))):
            out = net(x.to(next(reference.parameters()).device))
            INNER[loss](out, net.kept).backward()
        same_gradients(model, reference)


@on_ranks(2)
def test_torchs_grad_comes_by_outputs():
    whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference, model = kept_pair()
    x = whole.to(next(reference.parameters()).device).requires_grad_()
    own = rows(whole).to(x.device).requires_grad_()
    expected = torch.autograd.grad(scaled(reference(x)), x)[0]
    got = torch.autograd.grad(scaled(model(own)), own)[0]
    torch.testing.assert_close(got / 2, rows(expected), rtol=1e-12, atol=1e-14)
    model(own)
    with pytest.raises(RuntimeError, match="torch.autograd.grad only with respect to such a parameter"):
        torch.autograd.grad(scaled(model.kept[1]), own)
    reference, model = kept_pair(reshard=False)
    for net, given in ((reference, x), (model, own)):
        net(given)
    got, expected = (
        torch.autograd.grad(scaled(net.kept[1]), given)[0] for net, given in ((model, own), (reference, x))
    )
    torch.testing.assert_close(got / 2, rows(expected), rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_a_part_of_the_loss_at_a_time():
    whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference, model = kept_pair()
    for net, x in ((reference, whole), (model, rows(whole))):
        out = net(x.to(next(reference.parameters()).device))
        scaled(net.kept[1]).backward(retain_graph=True)
        scaled(out).backward()
    same_gradients(model, reference)


@on_ranks(2)
def test_only_the_blocks_that_a_pass_needs_are_gathered():
    reference, model = kept_pair()
    model(torch.randn(4, 8, dtype=torch.float64, device=next(reference.parameters()).device))
    with count_collectives() as counts:
        scaled(model.kept[0]).backward()
    assert counts["all_gather"] == 1


@on_ranks(2)
def test_a_freed_parameter_is_refused_where_two_calls_wait():
    reference, model = kept_pair()
    x = torch.randn(4, 8, dtype=torch.float64, device=next(reference.parameters()).device)
    first, kept = model(x), list(model.kept)
    second = model(x)
    with pytest.raises(RuntimeError, match=r"backward needs parameters that are freed\. It came to a sharded"):
        scaled(kept[1]).backward()
    assert first.shape == second.shape
    reference, model = kept_pair(reshard=False)
    for net in (reference, model):
        kept = net(x) is not None and list(net.kept)
        net(x)
        scaled(kept[1]).backward()
    same_gradients(model, reference)


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
def test_a_loss_of_a_modules_own_parameters_is_reduced():
    whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference = seeded(Penalized)
    model = seeded(Penalized)
    for module in (model.first, model.block, model.head, model):
        fully_shard(module, data_mesh(), reshard_after_forward=False)
    for net, x in ((reference, whole), (model, rows(whole))):
        out = net(x.to(next(reference.parameters()).device))
        (scaled(out) + net.penalty).backward()
    same_gradients(model, reference)
    for net, x in ((reference, whole), (model, rows(whole))):
        net.zero_grad()
        net(x.to(next(reference.parameters()).device))
        net.penalty.backward()
    same_gradients(model, reference)
