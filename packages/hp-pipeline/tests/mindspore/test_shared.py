"""Weights that several stages share, against one process."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import hp_pipeline
from hp_dtensor import Replicate, distribute_tensor, init_device_mesh
from hp_pipeline import PipelineStage, SharedParameterInfo, placed
from hp_platform import get_platform
from hp_testing import on_ranks

pytestmark = pytest.mark.device


class Table(nn.Cell):
    """A stage that multiplies by a table of its own and by the shared one."""

    def __init__(self, index, stages, table=None):
        super().__init__()
        generator = np.random.default_rng(index)
        self.own = Parameter(Tensor(generator.normal(size=(4, 4))), name=f"own{index}")
        self.table = Parameter(Tensor(generator.normal(size=(4, 4))), name="table") if table is None else table
        self.last = index == stages - 1

    def construct(self, x):
        y = ops.tanh(ops.matmul(ops.matmul(x, self.own), self.table))
        return (y * y).sum() if self.last else y


def whole(stages, x, micro_batches):
    cells = [Table(0, stages)]
    cells += [Table(index, stages, cells[0].table) for index in range(1, stages)]

    def loss(x):
        for cell in cells:
            x = cell(x)
        return x

    parameters = [cells[0].table, *(cell.own for cell in cells)]
    step = mindspore.value_and_grad(loss, None, parameters)
    columns = zip(*(step(Tensor(part))[1] for part in np.split(x, micro_batches)))
    return [sum(each.asnumpy() for each in column) / micro_batches for column in columns]


@on_ranks(2)
@pytest.mark.parametrize(("name", "shape", "stages"), [("Schedule1F1B", "line", 2), ("ScheduleZBV", "v", 4)])
def test_a_table_of_all_stages(name, shape, stages):
    rank = get_platform().groups.rank()
    info = SharedParameterInfo("table", tuple(range(stages)))
    own = {}
    for index in [index for index, place in enumerate(placed(shape, 2)) if place == rank]:
        own[index] = Table(index, stages, next((each.table for each in own.values()), None))
    parts = [PipelineStage(cell, index, stages, shared_parameters=[info]) for index, cell in own.items()]
    schedule = getattr(hp_pipeline, name)(parts, 2)
    x = np.random.default_rng(9).normal(size=(4, 4))
    expected = whole(stages, x, 2)
    for runs in (1, 2):
        for _ in range(runs):
            schedule.run(Tensor(x))
        parameters = [own[min(own)].table, *(cell.own for cell in own.values())]
        table, *others = [each.asnumpy() for each in schedule.take_gradients(parameters)]
        np.testing.assert_allclose(table, runs * expected[0], rtol=1e-12, atol=1e-12)
        for index, gradient in zip(own, others, strict=True):
            np.testing.assert_allclose(gradient, runs * expected[1 + index], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_what_differs_is_refused_on_all_ranks():
    rank = get_platform().groups.rank()
    table = Parameter(Tensor(np.ones((4, 4 + rank))), name="table")
    stage = PipelineStage(Table(rank, 2, table), rank, 2, shared_parameters=[SharedParameterInfo("table", (0, 1))])
    with pytest.raises(ValueError, match=r"Float64 of shape \(4, 4\) on stage 0, but Float64 of shape \(4, 5\) on"):
        hp_pipeline.Schedule1F1B(stage, 2).run(Tensor(np.ones((2, 4))))
    assert table.asnumpy().all()
    mesh, x = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))["tp"], np.ones((4, 4))

    def build(table):
        infos = [SharedParameterInfo("table", (0, 1))]
        return hp_pipeline.Schedule1F1B(PipelineStage(Table(rank, 2, table), rank, 2, shared_parameters=infos), 2)

    table = Table(0, 2).table
    with pytest.raises(ValueError, match="a DTensor of placements .*: on MindSpore plain parameters are shared alone"):
        build(distribute_tensor(table, mesh, [Replicate()])).run(Tensor(x))
    schedule = build(table)
    schedule.run(Tensor(x))
    gradient = schedule.take_gradients([table])[0].asnumpy()
    np.testing.assert_allclose(gradient, whole(2, x, 2)[0], rtol=1e-12, atol=1e-12)
