"""Cells in training: fully_shard and optimizers, resumed in another layout."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, complex64, mint, nn, value_and_grad
from mindspore.experimental import optim

from hp_checkpoint import Checkpointer, CheckpointError, load, save
from hp_checkpoint.mindspore import port
from hp_dtensor import (
    SkipDTensorDispatch,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    parallelize_value_and_grad,
)
from hp_fsdp import full_state_dict, fully_shard
from hp_optim import ChainedOptimizer, get_hyper_optimizer
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
@pytest.mark.parametrize(
    "kind", ["adamw", "muon", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("momentum", "sgd"))]
)
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
    with pytest.raises(ValueError, match="parameter 0 of SGD, 'up.weight' of shape .*, is not the model's. Make"):
        checkpoints.save(1, Net(1), optim.SGD(weights, lr=0.1))
    checkpoints.save(1, cell, optim.SGD(weights, lr=0.1, momentum=0.5))
    with pytest.raises(ValueError, match="optimizer is of another class: it has dampening, momentum, and lacks betas"):
        checkpoints.load(cell, optim.AdamW(weights))
    again = Net(1)
    checkpoints.load(again, optim.SGD(again.trainable_params(), lr=0.1, momentum=0.5))
    np.testing.assert_array_equal(again.up.weight.asnumpy(), cell.up.weight.asnumpy())


@on_ranks(1)
def test_the_model_is_loaded_without_states_that_no_optimizer_here_has(tmp_path, monkeypatch):
    cell, other = Net(), Net(1)
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    with monkeypatch.context() as patched:
        patched.setitem(port._SAVED, "exp_avg", "exp_avg_8bit")  # as PyTorch's optimizers may have
        checkpoints.save(1, cell, made("adamw", cell))
    with pytest.raises(ValueError, match=r"has the state 'exp_avg_8bit' of .* saved, or load the model alone"):
        checkpoints.load(other, made("adamw", other))
    checkpoints.load(other)
    np.testing.assert_array_equal(other.up.weight.asnumpy(), cell.up.weight.asnumpy())


@on_ranks(1)
@pytest.mark.parametrize("kind", ["Adadelta", "Momentum", "AdamW"])
def test_states_of_other_optimizers_are_saved_by_name(tmp_path, kind):
    cell = Net()
    weights = cell.trainable_params()
    make = {
        "Adadelta": lambda: optim.Adadelta(weights),
        "Momentum": lambda: nn.Momentum(weights, 0.1, 0.9),
        "AdamW": lambda: mint.optim.AdamW(weights),
    }[kind]
    optimizer, text = make(), {"Adadelta": "Adadelta has the states accum_update, which"}
    with pytest.raises(
        TypeError,
        match=text.get(kind, f"{kind} is no optimizer of .*of others pass the states to hp_checkpoint.save as"),
    ):
        Checkpointer(tmp_path / "run", background=False).save(1, cell, optimizer)
    states = {"Adadelta": "accum_update", "Momentum": "moments", "AdamW": "exp_avg"}[kind]

    def by_name(optimizer):
        return {weight.name: state for weight, state in zip(weights, getattr(optimizer, states), strict=True)}

    for number, state in enumerate(by_name(optimizer).values()):
        state.set_data(Tensor(np.full(state.shape, number + 1.0, np.float32)))
    save({"model": cell.state_dict(), states: by_name(optimizer)}, checkpoint_id=tmp_path / "states")
    other = make()
    load({states: by_name(other)}, checkpoint_id=tmp_path / "states")
    for number, state in enumerate(by_name(other).values()):
        assert (state.asnumpy() == number + 1).all()


@on_ranks(2)
def test_optimizers_that_do_not_fit_are_made_again(tmp_path):
    """Of the model as it is, after it is sharded."""
    checkpoints = Checkpointer(tmp_path / "run", background=False)
    cell = Net()
    early = made("adamw", cell)
    sharded(cell, 2)
    with pytest.raises(
        CheckpointError, match="on this rank, the parameter's part .*: make the optimizer after the par"
    ):
        checkpoints.save(1, cell, early)
    late = made("adamw", cell)
    train(cell, late, (0, 2))
    checkpoints.save(2, cell, late)
    other = sharded(Net(1), 2)
    with pytest.raises(ValueError, match="is not the model's. Make the optimizer of the model as it is now"):
        checkpoints.load(other, late)
    again = made("adamw", other)
    checkpoints.load(other, again)
    train(cell, late, (2, 4)), train(other, again, (2, 4))
    expected = whole(cell)
    for name, value in whole(other).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@on_ranks(1)
def test_parameters_of_different_numbers_of_steps_have_an_optimizer_each(tmp_path):
    def chain(cell):
        kinds = {name: optim.AdamW([each], lr=0.1) for name, each in cell.parameters_and_names()}
        return ChainedOptimizer(cell, kinds)

    cell, x = Net(), Tensor(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    checkpoints, optimizer = Checkpointer(tmp_path / "run", background=False), chain(cell)
    train(cell, optimizer, (0, 1))
    _, found = value_and_grad(cell, None, [cell.down.weight])(x)
    optimizer.optimizers["down.weight"](found)
    checkpoints.save(2, cell, optimizer)
    other = Net(1)
    with pytest.raises(ValueError, match=r"saved after 1 and 2 steps .* Make an optimizer for each of them"):
        checkpoints.load(other, optim.AdamW(other.trainable_params(), lr=0.1))
    again = chain(other)
    checkpoints.load(other, again)
    train(cell, optimizer, (1, 3)), train(other, again, (1, 3))
    for one, two in zip(cell.get_parameters(), other.get_parameters(), strict=True):
        np.testing.assert_array_equal(one.asnumpy(), two.asnumpy(), err_msg=one.name)


@pytest.mark.parametrize("give", [init_parameters, nn.Cell.init_parameters_data])
def test_parameters_without_values_are_given_some(tmp_path, give):
    with init_empty_weights():
        cell = nn.SequentialCell(nn.Dense(4, 3))
    with pytest.raises(
        TypeError, match=r"has no values yet; call hp_dtensor.init_parameters\(cell\), or cell.init_param"
    ):
        save(dict(cell.state_dict(keep_vars=True)), checkpoint_id=tmp_path / "a")
    give(cell)
    save(dict(cell.state_dict(keep_vars=True)), checkpoint_id=tmp_path / "a")
    other = nn.SequentialCell(nn.Dense(4, 3))
    load(dict(other.state_dict(keep_vars=True)), checkpoint_id=tmp_path / "a")
    for one, two in zip(cell.get_parameters(), other.get_parameters(), strict=True):
        np.testing.assert_array_equal(one.asnumpy(), two.asnumpy())


def test_dtypes_that_a_checkpoint_lacks_are_converted(tmp_path):
    wide = Tensor(np.array([1 + 2j, 3]))
    with pytest.raises(TypeError, match="'w' has dtype Complex128, which safetensors lacks; convert it before the ca"):
        save({"w": wide}, checkpoint_id=tmp_path / "a")
    save({"w": wide.astype(complex64)}, checkpoint_id=tmp_path / "a")
    found = {"w": Tensor(np.zeros(2, np.complex64))}
    load(found, checkpoint_id=tmp_path / "a")
    assert found["w"].asnumpy().tolist() == [1 + 2j, 3]
