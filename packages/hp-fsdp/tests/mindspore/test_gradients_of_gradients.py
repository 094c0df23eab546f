"""Gradients of a sharded Cell's gradients: refused, not zero; their values can be used."""

from __future__ import annotations

import mindspore
import pytest
from fsdp_cells import batch, differentiated, gathered, loss_of, pair, train
from mindspore import mint, ops

from hp_dtensor import parallelize_value_and_grad
from hp_testing import on_ranks

TWICE = r"was differentiated twice: on MindSpore its gradient is a number .* ops\.stop_gradient\(\)"


def penalty(cell, x):
    return loss_of(cell(x)) + mindspore.grad(lambda x: mint.sum(cell(x)))(x).square().mean()


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_gradient_penalty_is_refused(reshard: bool):
    reference, model = pair(reshard_after_forward=reshard)
    with pytest.raises(NotImplementedError, match="an input of a Cell that fully_shard shards " + TWICE):
        differentiated(model, lambda x: penalty(model, x))(batch()[1])
    with pytest.raises(NotImplementedError, match="an input of a Cell that fully_shard shards " + TWICE):
        parallelize_value_and_grad(lambda x: penalty(model, x))(batch()[1])
    train(reference, model, steps=1)
    assert not any(gathered(model))


@on_ranks(2)
def test_a_penalty_on_the_gradients_of_parameters_is_refused():
    reference, model = pair()
    parameters = model.trainable_params()

    def run(x):
        gradients = mindspore.grad(lambda x: loss_of(model(x)), None, parameters)(x)
        return sum(gradient.square().sum() for gradient in gradients)

    with pytest.raises(NotImplementedError, match="a parameter of .*, sharded by fully_shard, " + TWICE):
        differentiated(model, run)(batch()[1])
    train(reference, model, steps=1)
    assert not any(gathered(model))


@on_ranks(2)
def test_a_gradient_as_numbers_inside_a_loss():
    def run(cell, x):
        direction = ops.stop_gradient(mindspore.grad(lambda x: mint.sum(cell(x)))(x))
        return loss_of(cell(x)) + loss_of(cell(x + 0.1 * mint.sign(direction)))

    reference, model = pair()
    train(reference, model, steps=2, run=run)
    assert not any(gathered(model))
