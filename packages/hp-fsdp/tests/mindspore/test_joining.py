"""Cells and parameters that join a model after it was sharded, optimizers made before, ranks with different models."""

from __future__ import annotations

import copy
from typing import Any

import mindspore
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from fsdp_cells import Block, Net, batch, data_mesh, differentiated, pair, same_gradients, seeded, train, world
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common.initializer import Normal, initializer
from mindspore.experimental import optim

from hp_dtensor import (
    DTensor,
    SkipDTensorDispatch,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
)
from hp_fsdp import MixedPrecisionPolicy, full_state_dict, fully_shard, load_full_state_dict
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import device_type, on_ranks


class Adapter(nn.Cell):
    """Wraps a Cell that is there, as adapters do."""

    def __init__(self, inner: nn.Cell, features: int, out: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = mint.nn.Linear(features, 2, bias=False)
        self.up = mint.nn.Linear(2, out, bias=False)

    def construct(self, x):
        return self.inner(x) + self.up(self.down(x))


class Open(Net):
    """A Net with places for more."""

    def construct(self, x):
        y = super().construct(x)
        y = y + self.second(x) if hasattr(self, "second") else y
        return y * self.scale if hasattr(self, "scale") else y


def drawn(cell: nn.Cell) -> nn.Cell:
    return seeded(lambda: cell)


def head_replaced(net: Any) -> None:
    net.last = drawn(mint.nn.Linear(7, 4))


def adapted(net: Any) -> None:
    for parameter in net.trainable_params():
        parameter.requires_grad = False
    for number, block in enumerate(net.blocks):
        adapter = Adapter(block.up, 7, 11)
        for part in (adapter.down, adapter.up):
            drawn(part)
        block.up = adapter
        for part in (adapter.down, adapter.up):
            part.weight.name = f"adapter{number}.{part.weight.name}"


def block_added(net: Any) -> None:
    net.blocks.append(drawn(Block()))


def scale_added(net: Any) -> None:
    net.scale = Parameter(Tensor(np.array([2.0, 1.0, 0.5], np.float32)), name="scale")


def copied(net: Any) -> None:
    net.second = copy.deepcopy(net.first)
    net.second.update_parameters_name("copy.")
    net.last = drawn(mint.nn.Linear(7, 7))


JOINING = {each.__name__: each for each in (head_replaced, adapted, block_added, scale_added, copied)}


@on_ranks(2)
@pytest.mark.parametrize("name", sorted(JOINING))
@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_what_joins_is_trained_as_in_a_single_process(name: str, steps: int):
    reference, model = pair(Open)
    train(reference, model, steps=steps)
    for net in (reference, model):
        JOINING[name](net)
    if name == "copied":  # copies of DTensors: an optimizer's states would be shaped as their parts
        for net in (reference, model):
            differentiated(net, dtensors=net is model)(batch()[1])
    # `train` makes the optimizers before the forward that takes the new parameters in.
    train(reference, model, steps=2, make=adamw)
    assert all(isinstance(parameter, DTensor) for parameter in model.get_parameters())


def adamw(cell: nn.Cell) -> Any:
    with SkipDTensorDispatch():
        optimizer = optim.AdamW(cell.trainable_params(), lr=0.02)

    def step(gradients: Any) -> None:
        with SkipDTensorDispatch():
            optimizer(gradients)

    return step


@on_ranks(2)
def test_an_optimizer_of_copies_that_join_later():
    _, model = pair(Open)
    copied(model)
    step, update = differentiated(model), adamw(model)
    _, gradients = step(batch()[1])
    if world()[0] == 0:  # its part happens to have the copy's size
        update(gradients)
    else:
        match = (
            r"AdamW has states of shape \(.*\) for parameter 'copy.* of which this rank has .* Make the optimizer after"
        )
        with pytest.raises(ValueError, match=match):
            update(gradients)
    reference, model = pair(Open)
    for net in (reference, model):
        copied(net)
        differentiated(net, dtensors=net is model)(batch()[1])  # the forward that the copy joins
    train(reference, model, steps=1, make=adamw)


@on_ranks(2)
def test_a_sharded_block_joins_in_deterministic_mode():
    reference, model = pair(deterministic=True)
    for net in (reference, model):
        head_replaced(net)
        block_added(net)
    fully_shard(model.blocks[-1], data_mesh(), deterministic=True)
    train(reference, model, steps=2)


class Gated(Block):
    def construct(self, x):
        inner = F.silu(self.up(x))
        return self.down(inner * self.gate if hasattr(self, "gate") else inner)


@on_ranks(4)
def test_a_parameter_joins_a_model_on_two_axes():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = seeded(lambda: Gated(8)), seeded(lambda: Gated(8))
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    fully_shard(parallelize_module(model, mesh["tp"], styles), mesh["dp"])
    for net in (reference, model):
        net.gate = Parameter(Tensor(np.linspace(0.5, 2.0, 11).astype(np.float32)), name="gate")
    whole_batch = batch(columns=8)[0]
    _, expected = differentiated(reference, dtensors=False)(whole_batch)
    rows = np.split(whole_batch.asnumpy(), 2)[mesh.get_local_rank("dp")]
    _, gradients = differentiated(model)(Tensor(rows))
    same_gradients(model, gradients, reference, expected)
    assert model.gate.device_mesh == mesh


@on_ranks(2)
def test_ignored_parameters_stay_ignored():
    model = seeded(Net)
    fully_shard(model, data_mesh(), ignored_params=[model.last.bias])
    for _ in range(2):
        differentiated(model)(batch()[1])
        assert not isinstance(model.last.bias, DTensor)
        model.more = nn.Identity()


@on_ranks(2)
def test_what_joins_and_cannot_be_taken_in():
    _, model = pair()
    model.last.weight = Parameter(initializer(Normal(), [3, 7]))
    with pytest.raises(RuntimeError, match=r"'last.weight' of Net was replaced by Parameter of shape \(3, 7\)"):
        model(batch()[1])
    _, model = pair()
    model.last = mint.nn.Linear(7, 3)
    model.last.weight = model.blocks[0].up.weight
    with pytest.raises(ValueError, match=r"'last.weight' of Net belongs to a group already"):
        model(batch()[1])
    _, model = pair()
    del model.last.weight
    with pytest.raises((RuntimeError, AttributeError), match=r"'last.weight' of Net is no longer in Linear"):
        model(batch()[1])
    train(*pair(headless), steps=1)


def headless() -> Net:
    net = Net()
    net.last = nn.Identity()
    return net


@on_ranks(2)
@pytest.mark.parametrize("way", ["whole", "part", "state"])
def test_what_is_not_replaced_but_written(way: str):
    reference, model = pair()
    values = Tensor(np.random.RandomState(5).randn(3, 7).astype(np.float32))
    sharded = model.last.weight
    model.last.weight = Parameter(values)
    with pytest.raises(
        RuntimeError, match=r"Change a sharded parameter in place \(set_data\), or load values with load_fu"
    ):
        model(batch()[1])
    model.last.weight = sharded
    if way == "whole":
        model.last.weight.set_data(values)
    elif way == "part":
        model.last.weight.set_data(distribute_tensor(values, sharded.device_mesh, sharded.placements))
    else:
        load_full_state_dict(model, {**full_state_dict(model), "last.weight": values})
    reference.last.weight.set_data(values)
    train(reference, model, steps=1)


@on_ranks(2)
@pytest.mark.parametrize("give", [init_parameters, nn.Cell.init_parameters_data])
def test_what_joins_without_values_gets_some(give: Any):
    _, model = pair(Open)
    with init_empty_weights():
        model.last = mint.nn.Linear(7, 4)
    with pytest.raises(
        RuntimeError, match=r"joined Open after .* has no values. Give it some .*: hp_dtensor.init_param"
    ):
        model(batch()[1])
    give(model.last)
    reference = seeded(Open)
    reference.last = mint.nn.Linear(7, 4)
    for own, other in zip(reference.last.get_parameters(), model.last.get_parameters(), strict=True):
        own.set_data(Tensor(other.asnumpy()))
    train(reference, model, steps=1)


@on_ranks(4)
def test_copies_of_parameters_on_other_axes_are_built_anew_or_before():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}

    class Twins(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.CellList([Block(8)])

        def construct(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def build() -> Any:
        model = seeded(Twins)
        parallelize_module(model.blocks[0], mesh["tp"], styles)
        return model

    def gradients_are_right(model: Any) -> None:
        reference = seeded(Twins)
        reference.blocks.append(seeded(lambda: Block(8)))
        everything = batch(columns=8)[0]
        _, expected = differentiated(reference, dtensors=False)(everything)
        rows = np.split(everything.asnumpy(), 2)[mesh.get_local_rank("dp")]
        same_gradients(model, differentiated(model)(Tensor(rows))[1], reference, expected)

    model = fully_shard(build(), mesh["dp"])
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    with pytest.raises(RuntimeError, match=r"is a copy of one .* Add the Cell before fully_shard, or build a new one"):
        model(Tensor(np.ones((2, 8), np.float32)))
    second = lambda: parallelize_module(seeded(lambda: Block(8)), mesh["tp"], styles)  # noqa: E731
    before, anew = build(), fully_shard(build(), mesh["dp"])
    before.blocks.append(second())
    anew.blocks.append(second())
    gradients_are_right(fully_shard(before, mesh["dp"]))
    gradients_are_right(anew)


@on_ranks(2)
def test_a_model_of_which_the_root_is_not_sharded():
    model = seeded(Net)
    for block in model.blocks:
        fully_shard(block, data_mesh())
    _, gradients = differentiated(model)(batch()[1])
    with pytest.raises(RuntimeError, match=r"4 of the 13 parameters of AdamW are in no sharded module.*\(7, 5\)"):
        adamw(model)(gradients)
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    with pytest.raises(RuntimeError, match=r"4 of the 13 parameters of Momentum are in no sharded module"):
        optimizer(gradients)
    train(seeded(Net), fully_shard(model, data_mesh()), steps=1, make=adamw)  # the model itself as well
    model, rest = seeded(Net), []
    for layer in (model.first, model.last):
        rest += layer.get_parameters()
    for block in model.blocks:
        fully_shard(block, data_mesh(), ignored_params=rest)
    _, gradients = differentiated(model)(batch()[1])
    adamw(model)(gradients)


OPTIMIZERS = {
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=0.02),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(parameters, learning_rate=0.02),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.02, 0.9),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_an_optimizer_made_before_fully_shard(kind: str):
    reference, model = seeded(lambda: Net(1)), seeded(lambda: Net(1))
    optimizers = [OPTIMIZERS[kind](net.trainable_params()) for net in (reference, model)]
    fully_shard(model, data_mesh())

    def make(cell: nn.Cell) -> Any:
        optimizer = optimizers.pop(0)

        def step(gradients: Any) -> None:
            with SkipDTensorDispatch():
                optimizer(gradients)

        return step

    train(reference, model, make=make, steps=2)


def refused(model: nn.Cell, match: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)ranks sharded different models.*{match}"):
        model(batch()[1])


@on_ranks(2)
def test_ranks_with_different_models():
    refused(pair(lambda: Net(2 + world()[0]))[1], "On some: 3 groups. On others: 4 groups")
    refused(pair(lambda: Net(1, 7 + world()[0]))[1], r"'first.weight\[7, 5\]'.*'first.weight\[8, 5\]'")
    policy = MixedPrecisionPolicy(param_dtype=None if world()[0] else mindspore.float16)
    refused(pair(mixed_precision=policy)[1], "Float32 as Float16.*Float32 as Float32")


@on_ranks(4)
def test_replicas_with_different_models():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("r", "s"))
    refused(pair(lambda: Net(2 + mesh.get_local_rank("r")), mesh=mesh)[1], "On some: 3 groups. On others: 4 groups")
