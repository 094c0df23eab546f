"""Cells cut into stages, and the same in one process."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hp_pipeline
from hp_pipeline import PipelineSchedule

WIDTH, CLASSES = 6, 5
SHAPES = {  # of each class of a schedule, how it places stages
    name: kind.shape
    for name, kind in vars(hp_pipeline).items()
    if isinstance(kind, type) and issubclass(kind, PipelineSchedule) and kind is not PipelineSchedule
}


class Linear(nn.Cell):
    def __init__(self, generator: np.random.Generator, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(generator.normal(size=(outputs, inputs)) / inputs), name="weight")
        self.bias = Parameter(Tensor(generator.normal(size=outputs)), name="bias")

    def construct(self, x):
        return ops.matmul(x, self.weight.T) + self.bias


class Block(nn.Cell):
    def __init__(self, generator: np.random.Generator) -> None:
        super().__init__()
        self.up, self.down = Linear(generator, WIDTH, 2 * WIDTH), Linear(generator, 2 * WIDTH, WIDTH)

    def construct(self, x):
        x *= 1.25
        return x + self.down(ops.tanh(self.up(x)))


class Net(nn.Cell):
    """So many stages of uneven numbers of blocks, and a head in the last."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        generator = np.random.default_rng(3)
        self.first, self.head = Linear(generator, 4, WIDTH), Linear(generator, WIDTH, CLASSES)
        self.parts = nn.CellList(
            [nn.CellList([Block(generator) for _ in range(1 + index % 2)]) for index in range(stages)]
        )
        for name, parameter in self.parameters_and_names():
            parameter.name = name

    def construct(self, x, target=None):
        for index in range(len(self.parts)):
            x = self.part(index, x, target)
        return x

    def part(self, index, x, target):
        if index == 0:
            x = self.first(x)
        for block in self.parts[index]:
            x = block(x)
        if index < len(self.parts) - 1:
            return x
        logits = self.head(x)
        return logits if target is None else ((logits - target) * (logits - target)).mean()


class Stage(nn.Cell):
    """One stage of a net."""

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(auto_prefix=False)
        self.blocks, self.ends = net.parts[index], nn.CellList(auto_prefix=False)
        if index == 0:
            self.ends.append(net.first)
        if index == len(net.parts) - 1:
            self.ends.append(net.head)
        self.work = [net, index]  # a list, so that the net is no part of the stage

    def construct(self, x, target=None):
        net, index = self.work
        return net.part(index, x, target)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(1)
    return Tensor(generator.normal(size=(rows, 4))), Tensor(generator.normal(size=(rows, CLASSES)))


class Descent:
    """Gradient descent, called as MindSpore's optimizers are, of which most have no float64 and each is compiled."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def __call__(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.set_data(parameter - 0.1 * gradient)


def reference(
    stages: int, rows: int, micro_batches: int, steps: int = 2, optimize: Any = Descent
) -> tuple[Net, list[Any], list[Any]]:
    """Train in one process; return the net, each step's losses, and the last step's gradients."""
    net = Net(stages)
    parameters = net.trainable_params()
    optimizer, step_of = optimize(parameters), mindspore.value_and_grad(net, None, parameters)
    losses: list[Any] = []
    gradients: list[Any] = []
    for _ in range(steps):
        x, target = (np.split(tensor.asnumpy(), micro_batches) for tensor in batch(rows))
        results = [step_of(Tensor(a), Tensor(b)) for a, b in zip(x, target, strict=True)]
        losses.append([loss.asnumpy() for loss, _ in results])
        gradients = [sum(each.asnumpy() for each in column) / micro_batches for column in zip(*(g for _, g in results))]
        optimizer([Tensor(gradient) for gradient in gradients])
    return net, losses, gradients
