"""Cells that run again in backward or whose saved tensors wait on the host; what MindSpore can't do is refused."""

from __future__ import annotations

import gc

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.graph.api import _pynative_executor

from hp_offload import (
    CheckpointPolicy,
    Saved,
    SwapManager,
    apply_memory_plan,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    place,
    plan_memory,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
    trace_saved,
)


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = mint.nn.Linear(4, 8), mint.nn.Linear(8, 4), mint.nn.Dropout(0.3)

    def construct(self, x):
        return x + self.down(self.dropout(mint.tanh(self.up(x))))


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Block() for _ in range(3)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def gradients(model):
    mindspore.manual_seed(1)
    x = Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    found = [mindspore.value_and_grad(model, 0, model.trainable_params())(x)[1] for _ in range(2)]
    return [each.asnumpy() for step in found for each in (step[0], *step[1])]


def compare(change):
    model = Net()
    expected = gradients(model)
    names = [name for name, _ in model.parameters_and_names()]
    for block in model.blocks:
        change(block)
    assert [name for name, _ in model.parameters_and_names()] == names
    assert all(map(np.array_equal, gradients(model), expected))


@pytest.mark.parametrize(
    "change", [checkpoint_wrapper, swap_wrapper, lambda block: swap_wrapper(block, group_swap=True)]
)
def test_the_bits_of_the_plain_program(change):
    compare(change)


def test_swap_moves_each_tensor_once_and_no_parameter():
    gc.collect()
    manager = SwapManager()
    manager.release_host_memory()
    model, before = Net(), manager.host_bytes
    for block in model.blocks:
        swap_wrapper(block)
    with manager.record() as events:
        gradients(model)
    names = list(dict.fromkeys(name for _, name in events))
    steps = [(what, names.index(name)) for what, name in events]
    assert steps[: len(steps) // 2] == [
        ("launch_offload", 0),
        ("wait_offload", 0),
        ("launch_offload", 1),
        ("wait_offload", 1),
        ("launch_load", 1),
        ("wait_load", 1),
        ("launch_load", 0),
        ("wait_load", 0),
    ]
    weights = sum(each.nbytes for each in model.get_parameters())
    assert 0 < manager.host_bytes - before < 2 * weights


class Parts(Block):
    """A block whose way through it is a function of its cells and the input."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def construct(self, x):
        return x + self.way(self, x)


def keeps(*args):
    return CheckpointPolicy.MUST_SAVE


def keeps_wide(tensor):
    """Of what a swap saves, let go what is as wide as the up projection's output."""
    return CheckpointPolicy.MUST_SWAP if tensor.shape[-1] == 8 else CheckpointPolicy.MUST_SAVE


def plain(block, x):
    return block.down(mint.tanh(block.up(x)))


def pieces(block, x):
    return checkpoint(block.down, mint.tanh(checkpoint(block.up, x)))


def held(tensor):
    """Let a tensor wait on the host by hand."""
    manager = SwapManager()
    manager.add_storage("held", tensor)
    manager.launch_offload("held")
    manager.wait_offload("held")


REFUSED = {
    "a policy": (
        lambda block, x: checkpoint(plain, block, x, policy_fn=keeps),
        r"checkpoint\(policy_fn=...\) is not .*checkpoint smaller functions, or leave policy_fn out to compute all",
        [pieces, lambda block, x: checkpoint(plain, block, x)],
    ),
    "inputs": (
        lambda block, x: checkpoint(plain, block, x, swap_inputs=True),
        r"checkpoint\(swap_inputs=True\) is not .*call swap around what uses them",
        [lambda block, x: swap(plain, block, x)],
    ),
    "a cell left out": (
        lambda block, x: checkpoint_exclude_wrapper(mint.nn.Tanh())(block.up(x)),
        "checkpoint_exclude_wrapper is not .*checkpoint the functions before and after the cell",
        [pieces],
    ),
    "a tensor": (
        lambda block, x: swap_tensor_wrapper(block.up(x)),
        r"swap_tensor_wrapper is not .*use swap\(function, ..., policy_fn=...\), which chooses tensors",
        [lambda block, x: swap(plain, block, x, policy_fn=keeps_wide)],
    ),
    "a storage": (
        lambda block, x: held(block.up(x)),
        r"SwapManager.add_storage is not .*Use swap\(function, ...\), whose saved tensors nobody else holds",
        [lambda block, x: swap(plain, block, x)],
    ),
    "reentrance": (
        lambda block, x: checkpoint(plain, block, x, use_reentrant=True),
        "there is no reentrant checkpoint here; leave it out, or pass False",
        [
            lambda block, x: checkpoint(plain, block, x),
            lambda block, x: checkpoint(plain, block, x, use_reentrant=False),
        ],
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_has_a_way_that_the_error_names(name):
    refused, text, ways = REFUSED[name]
    block, x = Parts(plain), Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))

    def step():
        # Two calls: what the first one saves leaves when the second begins.
        run = mindspore.value_and_grad(lambda x: block(block(x)).square().sum(), 0, block.trainable_params())
        loss, (to_x, gradients) = run(x)
        return [each.asnumpy() for each in (loss, to_x, *gradients)]

    expected = step()
    block.way = refused
    with pytest.raises((NotImplementedError, ValueError), match=text):
        step()
    _pynative_executor.clear_res()  # after two such errors MindSpore keeps recording, and can't index a tensor
    for block.way in ways:
        with SwapManager().record() as events:
            found = step()
        assert all(map(np.array_equal, found, expected))
        assert bool(events) == ("swap" in text)


def test_plans_of_memory_are_made_of_lists_and_applied_by_hand():
    pytest.importorskip("scipy", reason="plan_memory needs scipy, in hp-offload's extra plan")
    model, x = Net(), Tensor(np.ones((3, 4), np.float32))
    with pytest.raises(NotImplementedError, match="trace_saved .* is not .*plan_memory plans what is listed by hand"):
        trace_saved(model, (x,))
    listed = [Saved(f"blocks.{at}.up#0", 96, at + 1.0, 8.0 - at, 0.5) for at in range(3)]
    plan = plan_memory(listed, 200, 0.0)
    assert plan.predicted_peak <= 200 and plan.policies
    with pytest.raises(
        NotImplementedError, match="apply_memory_plan .*use checkpoint_wrapper and swap_wrapper on its ce"
    ):
        apply_memory_plan(model, plan)
    by_hand = {CheckpointPolicy.MUST_RECOMPUTE: checkpoint_wrapper, CheckpointPolicy.MUST_SWAP: swap_wrapper}
    expected, wrapped = gradients(model), 0
    for block, policy in zip(model.blocks, plan.policies.values(), strict=True):
        if policy in by_hand:
            by_hand[policy](block)
            wrapped += 1
    assert wrapped and all(map(np.array_equal, gradients(model), expected))


def test_what_is_not_supported_is_refused_by_name():
    x = Tensor(np.ones(3, np.float32))
    with pytest.raises(NotImplementedError, match=r"checkpoint\(policy_fn=...\) is not supported on MindSpore"):
        checkpoint(mint.exp, x, policy_fn=lambda *args: CheckpointPolicy.MUST_SAVE)
    for options in ({"policy": lambda *args: CheckpointPolicy.MUST_SAVE}, {"swap_inputs": True}):
        with pytest.raises(NotImplementedError, match="is not supported on MindSpore"):
            checkpoint_wrapper(mint.nn.Linear(2, 2), **options)
    with pytest.raises(NotImplementedError, match=r"checkpoint\(swap_inputs=True\) is not supported on MindSpore"):
        checkpoint(mint.exp, x, swap_inputs=True)
    with pytest.raises(NotImplementedError, match="checkpoint_exclude_wrapper is not supported on MindSpore"):
        checkpoint_exclude_wrapper(mint.nn.Linear(3, 3))(x)
    with pytest.raises(NotImplementedError, match="swap_tensor_wrapper is not supported on MindSpore"):
        swap_tensor_wrapper(x)
    with pytest.raises(NotImplementedError, match="place is not supported on MindSpore: parameters of a Cell stay"):
        place(mint.nn.Linear(2, 2), {"*": "host"})
    with pytest.raises(TypeError, match="swap: function is called, and 3 can't be"):
        swap(3, x)
