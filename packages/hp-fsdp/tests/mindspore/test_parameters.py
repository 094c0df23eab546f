"""Tied, unused, frozen, ignored and empty parameters."""

from __future__ import annotations

from typing import Any

import mindspore
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from fsdp_cells import (
    Block,
    Net,
    batch,
    close,
    data_mesh,
    differentiated,
    gathered,
    loss_of,
    pair,
    same_gradients,
    seeded,
    train,
    whole,
)
from mindspore import Tensor, mint, nn
from mindspore.common.initializer import Normal, initializer

from hp_dtensor import DTensor, init_empty_weights, init_parameters
from hp_fsdp import fully_shard
from hp_testing import on_ranks


class Tied(Net):
    """First and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.last = mint.nn.Linear(7, 5, bias=False)
        self.back = mint.nn.Linear(5, 7, bias=False)
        self.back.weight = self.first.weight

    def construct(self, x):
        return self.last(super_blocks(self, self.first(x))) + self.last(self.back(x))


def super_blocks(net, x):
    for block in net.blocks:
        x = block(x)
    return x


class Twice(Net):
    """Blocks that run twice, one beside the other."""

    def construct(self, x):
        x = self.first(x)
        return self.last(super_blocks(self, x) * super_blocks(self, mint.sin(x)))


class Unused(Net):
    """Parameters without a use: one in a block's group, one in the root's, and a whole group."""

    def __init__(self) -> None:
        super().__init__()
        self.never = mint.nn.Linear(3, 3)
        self.blocks[1].never = mint.nn.Linear(2, 2)

    def construct(self, x):
        x = self.first(x)
        return self.last(self.blocks[1](self.blocks[0](x)))


@on_ranks(2, 4)
@pytest.mark.parametrize("make", [Tied, Twice, Unused])
def test_uses(make: type):
    reference, model = pair(make)
    train(reference, model, steps=2)
    assert not any(gathered(model))


@on_ranks(2)
def test_unused_parameters_have_zeros():
    reference, model = pair(Unused)
    gradients = differentiated(model)(batch()[1])[1]
    unused = [
        gradient
        for parameter, gradient in zip(model.trainable_params(), gradients)
        if "never" in parameter.name or "blocks.2" in parameter.name
    ]
    assert len(unused) == 7
    for gradient in unused:
        assert isinstance(gradient, DTensor) and not whole(gradient).any()


@on_ranks(2)
@pytest.mark.parametrize("frozen", [["blocks.1.up.weight", "first.weight"], ["blocks.1."], ["last.", "first."]])
def test_frozen(frozen: list[str]):
    def make() -> nn.Cell:
        net = Net()
        for name, parameter in net.parameters_and_names():
            parameter.requires_grad = not any(name.startswith(start) for start in frozen)
        return net

    reference, model = pair(make)
    train(reference, model, steps=2)
    assert not any(gathered(model))
    everything, own = batch()
    inputs = mindspore.grad(lambda x: loss_of(model(x)), 0)(own)
    expected = mindspore.grad(lambda x: loss_of(reference(x)), 0)(own)
    close(inputs.asnumpy(), expected.asnumpy(), "gradient of the input")


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_parameters_frozen_for_a_forward_between_another_and_its_backward(options):
    def step(cell: nn.Cell, x: Tensor) -> Any:
        output = cell(x)
        for parameter in frozen[cell]:
            parameter.requires_grad = False
        other = cell(x)
        for parameter in frozen[cell]:
            parameter.requires_grad = True
        return loss_of(output - other / 2)

    reference, model = pair(**options)
    frozen = {cell: list(cell.trainable_params()) for cell in (reference, model)}
    everything, own = batch()
    for _ in range(2):
        _, expected = differentiated(reference, lambda x: step(reference, x), dtensors=False)(everything)
        _, gradients = differentiated(model, lambda x: step(model, x))(own)
        same_gradients(model, gradients, reference, expected)


@on_ranks(1)
def test_tied_over_two_groups():
    net = seeded(Tied)
    fully_shard(net.first, data_mesh())
    with pytest.raises(
        ValueError, match=r"parameter 'back.weight' of Tied belongs to a group already: 'weight' of Linear"
    ):
        fully_shard(net, data_mesh())
    reference, model = seeded(Tied), seeded(Tied)
    for block in model.blocks:  # neither of those that share the weight
        fully_shard(block, data_mesh())
    train(reference, fully_shard(model, data_mesh()), steps=1)


@on_ranks(2)
def test_ignored():
    reference, model = seeded(Net), seeded(Net)
    ignored = [model.last.weight, model.last.bias]
    fully_shard(model, data_mesh(), ignored_params=ignored)
    assert not isinstance(model.last.weight, DTensor) and isinstance(model.first.weight, DTensor)
    everything, own = batch()
    expected = differentiated(reference, dtensors=False)(everything)[1]
    gradients = list(differentiated(model)(own)[1])
    names = [parameter.name for parameter in model.trainable_params()]
    same = [i for i, name in enumerate(names) if not name.startswith("last.")]
    for index in same:
        close(whole(gradients[index]), expected[index].asnumpy(), names[index])


class Initialised(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = mindspore.Parameter(initializer(Normal(0.1), (7, 7), mindspore.float32), name="weight")

    def construct(self, x):
        return self.block(F.linear(x, self.weight))


@on_ranks(2)
def test_parameters_without_values():
    mindspore.set_seed(3)
    with init_empty_weights():
        model = Initialised()
    fully_shard(model.block, data_mesh())
    fully_shard(model, data_mesh())
    x = Tensor(np.ones((2, 7), np.float32))
    assert tuple(model.weight.shape) == (7, 7)
    with pytest.raises(RuntimeError, match=r"'weight' of Initialised has no values yet.*init_parameters"):
        model(x)
    init_parameters(model)
    local = model.weight.to_local()
    assert local.ndim == 1 and local.shape[0] == model.weight.local_shape[0] and local.asnumpy().any()
    plain = Initialised()
    for ours, theirs in zip(model.get_parameters(), plain.get_parameters()):
        theirs.set_data(ours.full_tensor())
    same_gradients(
        model,
        differentiated(model, lambda x: model(x).sum())(x)[1],
        plain,
        differentiated(plain, lambda x: plain(x).sum(), dtensors=False)(x)[1],
    )
