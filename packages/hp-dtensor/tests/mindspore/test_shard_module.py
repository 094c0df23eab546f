"""shard_module on a Cell: outputs and gradients of one process, and names that match nothing."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

from hp_dtensor import Layout, Replicate, Shard, parallelize_value_and_grad
from hp_dtensor.creation.sharding_plan import shard_module
from hp_testing import on_ranks

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        values = np.random.default_rng(1)
        self.up, self.down = mint.nn.Linear(6, 7), mint.nn.Linear(7, 6)
        self.scale = Parameter(Tensor(np.ones(6, np.float32)), name="scale")
        for parameter in self.get_parameters():
            parameter.set_data(Tensor(values.standard_normal(parameter.shape).astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        return self.down(mint.nn.functional.relu(self.up(x))) * self.scale


@on_ranks(2)
def test_a_plan_equals_one_process() -> None:
    net, plain, layout = Net(), Net(), Layout((2,), ("tp",))
    plan = {
        "forward": {"input": layout("None", "None"), "down.output": layout("tp", "None"), "output": layout()},
        "parameter": {"up.weight": layout("tp", "None"), "up.bias": layout("tp"), "do*.weight": layout("None", "tp")},
    }
    assert shard_module(net, plan) is net
    assert net.up.weight.placements == (Shard(0),) and net.scale.placements == (Replicate(),)
    value, wanted = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(Tensor(X))
    step = parallelize_value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    loss, grads = step(Tensor(X))
    np.testing.assert_allclose(loss.asnumpy(), value.asnumpy(), rtol=1e-5)
    for grad, expected in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(grad.full_tensor().asnumpy(), expected.asnumpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="'up.wieght' matches no parameter of Net; near: up.weight"):
        shard_module(plain, {"parameter": {"up.wieght": layout("tp", "None")}})
