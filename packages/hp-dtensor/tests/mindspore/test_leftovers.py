"""Nothing of a step on DTensors waits for Python's collector."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops

from hp_dtensor import (
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    init_device_mesh,
    parallelize_value_and_grad,
)
from hp_testing import on_ranks
from hp_testing.leftovers import leftovers

X = np.arange(24, dtype=np.float32).reshape(4, 6) / 7


@on_ranks(2)
def test_a_step_leaves_nothing_to_the_collector():
    mesh = init_device_mesh("cpu", (2,))
    x, w = distribute_tensor(Tensor(X), mesh, [Shard(0)]), distribute_tensor(Tensor(X), mesh, [Replicate()])

    def loss(x, w):
        y = ops.concat([x, w * 2.0]) + Tensor(X[:1])  # a list, a number, a plain tensor
        order, _ = ops.sort(y, 0)  # on whole tensors
        y = ops.matmul(y, y.T) + order.sum()
        return (y[:, 1:].redistribute(placements=[Replicate()]) ** 2).mean()

    step = parallelize_value_and_grad(loss, grad_position=(0, 1))
    with implicit_replication():
        assert leftovers(lambda: step(x, w)) == []
