"""The part of a model that a rank trains, as one Cell."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from pipeline_cells import Descent, Net, Stage, batch, reference

from hp_pipeline import PipelinedModel, PipelineStage, ScheduleGPipe, ScheduleZBV
from hp_platform import get_platform
from hp_testing import on_ranks


@on_ranks(2)
def test_a_rank_trains_its_part_of_a_model():
    rank, net = get_platform().groups.rank(), Net(4)
    own = [PipelineStage(Stage(net, index), index, 4) for index in ((0, 3) if rank == 0 else (1, 2))]
    model = PipelinedModel(ScheduleZBV(own, 4))
    names = [name for name, _ in model.parameters_and_names()]
    whole = {each.name: each for each in Net(4).trainable_params()}
    assert names and {each.name for each in model.trainable_params()} == set(names) == set(model.state_dict())
    assert set(names) < set(whole) and list(model.stages) == [stage.stage_index for stage in own]
    model.load_state_dict({name: Tensor(np.zeros(each.shape)) for name, each in whole.items()})
    assert all((each.asnumpy() == 0).all() for each in model.trainable_params())
    model.load_state_dict(whole)
    optimizer = Descent(model.trainable_params())
    for _ in range(2):
        x, target = batch(8)
        model.run(x, target=target)
        optimizer(model.schedule.take_gradients(optimizer.parameters))
    expected = {each.name: each for each in reference(4, 8, 4)[0].trainable_params()}
    for name, parameter in model.state_dict().items():
        np.testing.assert_allclose(parameter.asnumpy(), expected[name].asnumpy(), rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_what_a_model_refuses():
    class Half(nn.Cell):
        def __init__(self, name):
            super().__init__(auto_prefix=False)
            self.weight = Parameter(Tensor(np.ones(2)), name=name)

        def construct(self, x):
            return (x * self.weight).sum()

    def schedule(*names):
        stages = [PipelineStage(Half(name), index, len(names)) for index, name in enumerate(names)]
        return ScheduleGPipe(stages, 2, placement=[0] * len(names))

    with pytest.raises(ValueError, match="stage 1 and one before it have different tensors of the name 'weight'"):
        PipelinedModel(schedule("weight", "weight"))
    model = PipelinedModel(schedule("first", "second"))
    assert repr(model).startswith("PipelinedModel(ScheduleGPipe: PipelineStage(0 of 2: Half), ")
    with pytest.raises(KeyError, match=r"no values for \['second'\] of the stages \[0, 1\]"):
        model.load_state_dict({"first": Tensor(np.ones(2))})
    model = PipelinedModel(ScheduleGPipe(PipelineStage(Half("only"), 0, 1), 2))
    with pytest.raises(RuntimeError, match=r"call model.run\(...\), not model\(...\)"):
        model(mindspore.Tensor(1.0))
    losses = model.run(Tensor(np.array([[1.0, 2.0], [3.0, 4.0]])))
    assert [float(loss.asnumpy()) for loss in losses] == [3.0, 7.0]
