"""CommDebugMode on MindSpore: kinds, axes, lines, phases, and the Cells of the forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from hp_dtensor import Layout, parallelize_value_and_grad
from hp_dtensor.creation.sharding_plan import shard_module
from hp_dtensor.debugging.debug import CommDebugMode, Total
from hp_platform.communication.checks import observers
from hp_testing import on_ranks

BYTES = 4 * 6 * 4


def _line(mark: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


class Mlp(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = mint.nn.Linear(6, 8), mint.nn.Linear(8, 6)
        self.scale = Parameter(Tensor(np.ones(6, np.float32)), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return self.down(mint.nn.functional.relu(self.up(x * self.scale)))  # down is called


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def construct(self, x: Tensor) -> Tensor:
        return self.mlp(x)


@on_ranks(2)
def test_a_parallel_mlp() -> None:
    net, tensor = Net(), Layout((2,), ("tensor",))
    plan = {
        "forward": {"input": tensor(), "mlp.down.output": tensor()},
        "parameter": {
            "mlp.up.weight": tensor("tensor", "None"),
            "mlp.up.bias": tensor("tensor"),
            "mlp.down.weight": tensor("None", "tensor"),
        },
    }
    shard_module(net, plan)
    step = parallelize_value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
    x = Tensor(np.ones((4, 6), np.float32))
    with CommDebugMode() as comm:
        step(x)  # the step
    assert observers == []
    assert comm.totals("phase", "module", "kind", "bytes") == {
        ("forward", "Net.mlp.down", "all_reduce", BYTES): Total(1, BYTES),
        ("backward", "", "all_reduce", BYTES): Total(1, BYTES),  # of up's input
    }
    forward, backward = comm.events
    assert [(e.file, e.line) for e in comm.events] == [
        (__file__, _line("down is called")),
        (__file__, _line("the step")),
    ]
    assert all("tensor" in event.axis.split("|") and (event.duration or 0) > 0 for event in comm.events)
    assert forward.start + (forward.duration or 0) <= backward.start
