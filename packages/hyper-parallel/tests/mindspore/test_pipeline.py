"""Stages of a pipeline on MindSpore whose parameters are DTensors, against one process."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_optim import AdamW
from hp_pipeline import PipelineError, PipelineStage, ScheduleGPipe, ScheduleZBV
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.device


class Block(nn.Cell):
    """A matrix product, the loss where it is the last, optionally over the ranks of a mesh."""

    def __init__(self, index, mesh=None, whole=True):
        super().__init__()
        generator = np.random.default_rng(index)
        self.up = Parameter(Tensor(generator.normal(size=(4, 6)).astype(np.float32)), name=f"{index}.up")
        self.down = Parameter(Tensor(generator.normal(size=(6, 4)).astype(np.float32)), name=f"{index}.down")
        self.last, self.mesh, self.whole = index == 1, [mesh], whole
        if mesh is not None:
            self.up = distribute_tensor(self.up, mesh, [Shard(1)])
            self.down = distribute_tensor(self.down, mesh, [Shard(0)])

    def construct(self, x):
        (mesh,) = self.mesh
        if mesh is not None:
            x = DTensor.from_local(x, mesh, [Replicate()])
        y = mint.matmul(mint.tanh(mint.matmul(x, self.up)), self.down)
        if mesh is not None:
            y = y.redistribute(mesh, [Replicate()])
            y = y.to_local() if self.whole else y
        return (y * y).mean() if self.last else y


def alone():
    """The group of this rank, whose pipeline has all stages."""
    groups = get_platform().groups
    return groups.new_group([groups.rank()])


def batches():
    return np.random.default_rng(5).normal(size=(2, 4, 4)).astype(np.float32)


def reference(inputs):
    """Parameters, and a function of their gradients: the mean over inputs."""
    first, last = Block(0), Block(1)
    parameters = [*first.trainable_params(), *last.trainable_params()]
    step = mindspore.value_and_grad(lambda x: last(first(x)), None, parameters)

    def gradients():
        each = [step(Tensor(x))[1] for x in inputs]
        return [Tensor(np.mean([gradient.asnumpy() for gradient in column], 0)) for column in zip(*each, strict=True)]

    return parameters, gradients


def compare(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one, DTensor)
        np.testing.assert_allclose(one.full_tensor().asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_fully_shard_inside_of_stages():
    mesh, rank = init_device_mesh(device_type(), (2,)), get_platform().groups.rank()
    stages = [PipelineStage(fully_shard(Block(index), mesh), index, 2) for index in range(2)]
    schedule = ScheduleZBV(stages, 2, group=alone())
    expected, expected_gradients = reference(batches())
    parameters = [each for stage in stages for each in stage.submodule.trainable_params()]
    optimizer, other = AdamW(parameters, lr=0.01), AdamW(expected, lr=0.01)
    for _ in range(2):
        schedule.run(Tensor(batches()[rank]))
        gradients, wanted = schedule.take_gradients(parameters), expected_gradients()
        compare(gradients, wanted)
        optimizer(gradients)
        other(wanted)
    compare(parameters, expected)


@on_ranks(2)
def test_tensor_parallel_stages():
    mesh = init_device_mesh(device_type(), (2,))
    stages = [PipelineStage(Block(index, mesh), index, 2) for index in range(2)]
    schedule = ScheduleZBV(stages, 2, group=alone())
    parameters = [each for stage in stages for each in stage.submodule.trainable_params()]
    none = schedule.take_gradients(parameters)
    compare(none, [Tensor(np.zeros(each.shape, np.float32)) for each in parameters])
    schedule.run(Tensor(batches()[0]))
    compare(schedule.take_gradients(parameters), reference(batches()[:1])[1]())


@on_ranks(2)
def test_a_loss_that_is_a_dtensor_is_refused():
    mesh = init_device_mesh(device_type(), (2,))
    block = Block(1, mesh, whole=False)
    with pytest.raises(PipelineError, match=r"at 0B0: TypeError: a stage returned a DTensor of placements \(Replicate"
                       r"\(\),\); on MindSpore backward begins at plain tensors: return its full_tensor"):  # fmt: skip
        ScheduleGPipe(PipelineStage(block, 0, 1), 2, group=alone()).run(Tensor(batches()[0]))
