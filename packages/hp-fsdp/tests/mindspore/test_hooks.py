"""When parameters are gathered and freed, what is communicated, and what may happen in between."""

from __future__ import annotations

import gc

import mindspore
import pytest
from fsdp_cells import (
    Block,
    Net,
    batch,
    close,
    differentiated,
    gathered,
    groups_of,
    loss_of,
    pair,
    same_gradients,
    sgd,
    train,
)
from mindspore import mint, nn, ops

from hp_dtensor import DTensor
from hp_dtensor.debugging.debug import CommDebugMode
from hp_fsdp import HSDPModule
from hp_fsdp.mindspore.groups.group import Call
from hp_platform import count_collectives
from hp_testing import on_ranks


@on_ranks(2)
def test_memory_comes_and_goes():
    _, model = pair()
    block, seen = model.blocks[1], {}
    block.up.register_forward_hook(lambda cell, inputs, output: seen.update(inside=gathered(model)))

    def run(x):
        out = model(x)
        seen["after forward"] = gathered(model)
        assert isinstance(block.up.weight, DTensor)
        out.register_hook(lambda gradient: seen.update(begins=gathered(model)))
        return loss_of(out)

    assert gathered(model) == [0, 0, 0, 0]
    differentiated(model, run)(batch()[1])
    root, one, *_ = seen["inside"]
    assert root > 0 and one == 0 and seen["inside"][2] > 0 and seen["inside"][3] == 0
    assert seen["after forward"] == [root, 0, 0, 0]  # the root's are used at once
    assert seen["begins"][1:3] == [0, 0]
    assert gathered(model) == [0, 0, 0, 0]
    # Without gradients nothing stays.
    model(batch()[1])
    assert gathered(model) == [0, 0, 0, 0]
    model.set_reshard_after_forward(False)
    differentiated(model, lambda x: (out := model(x), seen.update(kept=gathered(model)), loss_of(out))[2])(batch()[1])
    assert all(seen["kept"]) and gathered(model) == [0, 0, 0, 0]


@on_ranks(2)
def test_steps_leave_nothing_behind():
    gc.collect()
    before = [each for each in gc.get_objects() if type(each) is Call]  # of what an earlier test of these ranks left
    _, model = pair()
    step = differentiated(model)
    for _ in range(3):
        step(batch()[1])
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Call and not any(each is old for old in before)]


@on_ranks(2)
def test_two_gathers_and_one_reduction_a_group():
    _, model = pair()
    step = differentiated(model)
    for first in (True, False):
        with count_collectives() as counted:
            step(batch()[1])
        asked = {"all_reduce": 1} if first else {}  # whether all ranks have the same model
        assert dict(counted) == {"all_gather": 2 * 3 + 1, "reduce_scatter": 4, **asked}
    model.set_requires_gradient_sync(False)
    with count_collectives() as counted:
        step(batch()[1])
    assert dict(counted) == {"all_gather": 7}
    with count_collectives() as counted:
        model(batch()[1])
    assert dict(counted) == {"all_gather": 4}


@on_ranks(2)
def test_gathers_ahead_of_time():
    """What Ascend does, where gathers run beside the computation."""
    reference, model = pair()
    for group in groups_of(model):
        group.overlaps = True
    most = []
    for block in model.blocks:
        block.up.register_forward_pre_hook(
            lambda cell, inputs: most.append(sum(size > 0 for size in gathered(model)[1:]))
        )
    train(reference, model, steps=3)
    assert max(most) == 2 and not any(gathered(model))
    model.set_modules_to_forward_prefetch([model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
    train(reference, model, steps=1)
    assert not any(gathered(model))


class Outputs(nn.Cell):
    """Gives a dictionary and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Several()])
        self.first = mint.nn.Linear(5, 7)

    def construct(self, x):
        out = self.blocks[0](self.first(x), scale=2.0)
        return (out["sum"] + out["parts"][0], out["parts"][1])


class Several(Block):
    def construct(self, x, *, scale):
        up = self.up(x)
        return {"sum": self.down(up) * scale, "parts": (mint.sin(x), up)}


@on_ranks(2)
def test_nested_outputs():
    reference, model = pair(Outputs)

    def run(cell, x):
        a, b = cell(x)
        return loss_of(a) + (b * b).mean()

    train(reference, model, steps=2, run=run)
    # Only some of the outputs used.
    train(reference, model, steps=1, run=lambda cell, x: loss_of(cell(x)[1]))
    assert not any(gathered(model))


class Recomputing(Net):
    reentrant = False

    def construct(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = mindspore.recompute(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Inside(Block):
    def construct(self, x):
        return x + self.down(mindspore.recompute(self.up, x, use_reentrant=False))


class RecomputingInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Inside(), Inside()])


class Reentrant(Recomputing):
    reentrant = True


@on_ranks(2)
@pytest.mark.parametrize("make", [Recomputing, RecomputingInside, Reentrant])
def test_recomputation(make: type):
    reference, model = pair(make)
    train(reference, model, steps=2)
    assert not any(gathered(model))


@on_ranks(2)
def test_several_forwards_before_backward():
    def twice(cell, x):
        return loss_of(cell(x)) + loss_of(cell(x * 0.5))

    reference, model = pair()
    train(reference, model, steps=2, run=twice)
    assert not any(gathered(model))
    model.set_reshard_after_forward(False)
    train(reference, model, steps=2, run=twice)


@on_ranks(2)
def test_unshard_by_hand():
    reference, model = pair()
    block = model.blocks[0]
    sharded = block.up.weight
    assert isinstance(model, HSDPModule) and isinstance(sharded, DTensor)
    block.unshard()
    assert not isinstance(block.up.weight, DTensor)
    close(block.up.weight.asnumpy(), reference.blocks[0].up.weight.asnumpy(), "unsharded")
    block.reshard()
    assert block.up.weight is sharded
    handle = block.unshard(async_op=True)
    handle.wait()
    with count_collectives() as counted:
        model(batch()[1])
    assert counted["all_gather"] == 3  # the block is there
    assert block.up.weight is sharded
    train(reference, model, steps=1)


@on_ranks(2)
def test_an_error_in_forward_leaves_a_model_that_trains():
    reference, model = pair()

    def fails(cell, inputs, output):
        raise ValueError("on purpose")

    block = model.blocks[1]
    handle = block.up.register_forward_hook(fails)
    with pytest.raises(ValueError, match="on purpose"):
        differentiated(model)(batch()[1])
    handle.remove()
    assert isinstance(block.up.weight, DTensor) and not any(gathered(model))
    train(reference, model, steps=1)


@on_ranks(2)
def test_an_error_in_backward_leaves_a_model_that_trains():
    reference, model = pair()

    def fails(gradient):
        raise ValueError("on purpose")

    def hooked(x):
        hidden = model.blocks[0](x @ ops.ones((5, 7), x.dtype))
        middle = hidden * 1.0
        middle.register_hook(fails)
        return loss_of(model.blocks[1](middle)) + loss_of(model(x))

    with pytest.raises(ValueError, match="on purpose"):
        differentiated(model, hooked)(batch()[1])
    train(reference, model, steps=1)
    assert not any(gathered(model))

    def inside(cell, inputs, output):
        output.register_hook(fails)

    handle = model.blocks[1].up.register_forward_hook(inside)
    with pytest.raises(ValueError, match="on purpose"):
        differentiated(model)(batch()[1])
    handle.remove()
    train(reference, model, steps=1)
    assert not any(gathered(model))


@on_ranks(2)
def test_the_next_forward_sees_new_values():
    reference, model = pair()
    model.set_reshard_after_forward(False)
    everything, own = batch()
    _, gradients = differentiated(model)(own)
    kept = model(own)
    sgd(model)(gradients)
    after = model(own)
    assert (kept.asnumpy() != after.asnumpy()).any()
    _, expected = differentiated(reference, dtensors=False)(everything)
    same_gradients(model, gradients, reference, expected)
    sgd(reference)(expected)
    close(after.asnumpy(), reference(own).asnumpy(), "output")


@on_ranks(2)
def test_a_groups_collectives_are_its_cells():
    _, model = pair()
    with CommDebugMode() as comm:
        differentiated(model, lambda x: loss_of(model(x)))(batch()[1])
    names = ["Net", *(f"Net.blocks.{i}" for i in range(3))]
    scattered = [(event.phase, event.module) for event in comm.events if event.kind == "reduce_scatter"]
    assert sorted(scattered) == [("backward", name) for name in names]
    gathered_for = {(event.phase, event.module) for event in comm.events if event.kind == "all_gather"}
    assert {name for _, name in gathered_for} == set(names) and ("backward", names[2]) in gathered_for
