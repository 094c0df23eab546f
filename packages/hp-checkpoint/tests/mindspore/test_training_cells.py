"""Cells in training: fully_shard and optimizers, resumed in another layout."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, value_and_grad
from mindspore.experimental import optim

from hp_checkpoint import Checkpointer
from hp_dtensor import SkipDTensorDispatch, init_device_mesh, parallelize_value_and_grad
from hp_fsdp import full_state_dict, fully_shard
from hp_optim import get_hyper_optimizer
from hp_testing import device_type, on_ranks


class Net(nn.Cell):
    def __init__(self, seed=0, hidden=8):
        super().__init__()
        self.up, self.down = mint.nn.Linear(6, hidden), mint.nn.Linear(hidden, 5, bias=False)
        generator = np.random.default_rng(seed)
        for parameter in self.get_parameters():
            parameter.set_data(Tensor(generator.normal(size=parameter.shape).astype(np.float32)))

    def construct(self, x):
        return mint.square(self.down(mint.tanh(self.up(x)))).mean()


def sharded(cell, ranks):
    return fully_shard(cell, init_device_mesh(device_type(), (ranks,), mesh_dim_names=("dp",)))


MAKE = {
    "adamw": lambda cell: optim.AdamW(cell.trainable_params(), lr=0.1, amsgrad=True),
    "momentum": lambda cell: optim.SGD(cell.trainable_params(), lr=0.1, momentum=0.9),
    "sgd": lambda cell: optim.SGD(cell.trainable_params(), lr=0.1),
    "muon": lambda cell: get_hyper_optimizer(
        cell, ["up.weight", "down.weight"], ["up.bias"], muon_kwargs={"lr": 0.1}, adamw_kwargs={"lr": 0.1}
    ),
}


def made(kind, cell):
    with SkipDTensorDispatch():
        return MAKE[kind](cell)


def train(cell, optimizer, steps):
    weights = list(cell.trainable_params())
    gradients = (
        parallelize_value_and_grad(cell, None, weights)
        if hasattr(cell, "reshard")
        else value_and_grad(cell, None, weights)
    )
    for step in range(*steps):
        x = Tensor(np.random.default_rng(step).normal(size=(4, 6)).astype(np.float32))
        _, found = gradients(x)
        with SkipDTensorDispatch():
            if hasattr(optimizer, "optimizers"):
                optimizer.step({weight.name: each for weight, each in zip(weights, found)})
            else:
                optimizer(found)


def whole(cell):
    return {name: value.asnumpy().copy() for name, value in full_state_dict(cell).items()}


@on_ranks(2)
@pytest.mark.parametrize("kind", list(MAKE))
def test_training_goes_on(tmp_path, kind):
    """Bit for bit in the same layout; alone up to the order of sums."""
    cell = sharded(Net(), 2)
    optimizer = made(kind, cell)
    train(cell, optimizer, (0, 2))
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(2, cell, optimizer)
    saved = whole(cell)
    train(cell, optimizer, (2, 4))
    last = whole(cell)
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    for other, exact in ((sharded(Net(1), 2), True), (Net(1), False)):
        new = made(kind, other)
        train(other, new, (0, 1))  # into states that it has
        checkpoints.load(other, new)
        own = whole(other) if exact else {p.name: p.asnumpy().copy() for p in other.get_parameters()}
        assert all((own[name] == value).all() for name, value in saved.items())
        train(other, new, (2, 4))
        own = whole(other) if exact else {p.name: p.asnumpy() for p in other.get_parameters()}
        for name, value in last.items():
            np.testing.assert_allclose(own[name], value, rtol=0, atol=0 if exact else 1e-5)


@on_ranks(1)
def test_what_has_another_meaning_is_refused(tmp_path):
    cell = Net()
    weights = cell.trainable_params()
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    with pytest.raises(TypeError, match="Adadelta has the states accum_update, which PyTorch's optimizers have not"):
        checkpoints.save(1, cell, optim.Adadelta(weights))
    for optimizer in (nn.Momentum(weights, 0.1, 0.9), mint.optim.AdamW(weights)):
        with pytest.raises(TypeError, match=f"{type(optimizer).__name__} is no optimizer of mindspore.experi"):
            checkpoints.save(1, cell, optimizer)
    with pytest.raises(ValueError, match="parameter 0 of SGD, 'up.weight' of shape .*, is not the model's. Make"):
        checkpoints.save(1, Net(1), optim.SGD(weights, lr=0.1))
    checkpoints.save(1, cell, optim.SGD(weights, lr=0.1, momentum=0.5))
    with pytest.raises(ValueError, match="optimizer is of another class: it has dampening, momentum, and lacks betas"):
        checkpoints.load(cell, optim.AdamW(weights))
