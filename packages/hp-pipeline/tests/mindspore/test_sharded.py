"""Stages whose parameters hp-fsdp has sharded, against one process."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from pipeline_cells import Net, Stage, batch

import hp_pipeline
from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_pipeline import PipelineStage
from hp_testing import on_ranks

pytestmark = pytest.mark.device


@on_ranks(4)
def test_sharded_stages_equal_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, place = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stage = Stage(Net(2), index)
    fully_shard(stage, mesh["dp"])
    schedule = hp_pipeline.Schedule1F1B(PipelineStage(stage, index, 2), 2, group=mesh["pp"].get_group())
    x, target = batch(8)
    whole = Net(2)
    parameters = whole.trainable_params()
    expected = dict(
        zip([each.name for each in parameters], mindspore.value_and_grad(whole, None, parameters)(x, target)[1])
    )
    half = slice(4 * place, 4 * place + 4)
    own = stage.trainable_params()
    schedule.run(Tensor(x.asnumpy()[half]), target=Tensor(target.asnumpy()[half]))
    for parameter, gradient in zip(own, schedule.take_gradients(own), strict=True):
        value = gradient.full_tensor().asnumpy()
        np.testing.assert_allclose(value, expected[parameter.name].asnumpy(), rtol=1e-12, atol=1e-12)
