"""The part of a model that a rank trains, as one module."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipeline_models import Net, Stage, batch
from torch import nn

from hp_pipeline import PipelinedModel, PipelineStage, ScheduleGPipe, ScheduleZBV
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


@on_ranks(2)
def test_a_rank_has_its_part_of_a_model_by_the_whole_models_names():
    rank, net = dist.get_rank(), Net(4).double().to(device_type())
    own = (0, 3) if rank == 0 else (1, 2)
    model = PipelinedModel(ScheduleZBV([PipelineStage(Stage(net, index), index, 4) for index in own], 2))
    names = [name for name, _ in model.named_parameters()]
    expected = [
        name for name, _ in net.named_parameters() if name.startswith(tuple(f"parts.{index}." for index in own))
    ]
    ends = ["first.weight", "first.bias", "head.out.weight", "head.out.bias"] if rank == 0 else []
    assert sorted(names) == sorted([*expected, *ends]) == sorted(model.state_dict())
    assert list(model.parameters()) == [parameter for _, parameter in model.named_parameters()]
    assert list(model.stages) == list(own)
    assert not model.eval().stages[own[0]].training and model.train().stages[own[1]].training

    states = {name: torch.full_like(each, 2.0) for name, each in net.state_dict().items()}
    assert model.load_state_dict(states).missing_keys == []
    assert all((parameter == 2.0).all() for parameter in model.parameters())
    del states[names[0]]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{names[0]}"'):
        model.load_state_dict(states)
    assert model.load_state_dict(states, strict=False).missing_keys == [names[0]]

    x, target = batch(4, device_type())
    model.run(x, target=target)
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert repr(model) == f"PipelinedModel(ScheduleZBV: {model.schedule.stages[0]}, {model.schedule.stages[1]})"
    with pytest.raises(RuntimeError, match=r"call model.run\(...\), not model\(...\)"):
        model(x)


@on_ranks(1)
def test_a_tied_weight_of_two_stages_is_listed_once():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    stages = [nn.ModuleDict({"embed": first}), nn.ModuleDict({"head": second})]
    schedule = ScheduleGPipe([PipelineStage(each, index, 2) for index, each in enumerate(stages)], 2, placement=[0, 0])
    model = PipelinedModel(schedule)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "embed.bias", "head.bias"]
    assert list(model.state_dict()) == ["embed.weight", "embed.bias", "head.weight", "head.bias"]


@on_ranks(1)
def test_stages_that_are_no_part_of_one_model():
    def schedule(*modules):
        stages = [PipelineStage(each, index, len(modules), "cpu") for index, each in enumerate(modules)]
        return ScheduleGPipe(stages, 2, placement=[0] * len(modules))

    with pytest.raises(TypeError, match="the stage 1 is a function, not a module, so that it has no parameters"):
        PipelinedModel(schedule(nn.Linear(2, 2), lambda x: x.sum()))
    PipelinedModel(schedule(nn.Linear(2, 2), nn.Flatten()))
    with pytest.raises(ValueError, match="stage 1 and one before it have different tensors of the name 'weight'"):
        PipelinedModel(schedule(nn.Linear(2, 2), nn.Linear(2, 2)))
    whole = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model = PipelinedModel(schedule(*(nn.ModuleDict({name: part}) for name, part in whole.items())))
    assert list(model.state_dict()) == list(whole.state_dict())
