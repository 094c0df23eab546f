"""Cells that run again in backward or whose saved tensors wait on the host; what MindSpore can't do is refused."""

from __future__ import annotations

import gc

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from hp_offload import (
    CheckpointPolicy,
    SwapManager,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
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
    with pytest.raises(TypeError, match="swap: function is called, and 3 can't be"):
        swap(3, x)
