"""DTensors between stages, hp-dtensor's and torch's, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh as torch_mesh
from torch.distributed import tensor as torch_tensor

import hp_dtensor
import hp_pipeline
from hp_dtensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from hp_pipeline import PipelineError, PipelineSchedule, PipelineStage, schedules
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

WIDTH = 5


def weights():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator).to(device_type()) for _ in range(2)]


class Half(nn.Module):
    """A linear map in DTensors, whose result has the placements that are asked for."""

    def __init__(self, weight, mesh, placements, last):
        super().__init__()
        self.weight: Any = nn.Parameter(hp_dtensor.distribute_tensor(weight, mesh, [Replicate()]))
        self.mesh, self.placements, self.last = mesh, placements, last

    def forward(self, x, more: Any = None):
        if not self.last:
            x = DTensor.from_local(x, self.mesh, [Replicate()])
            y = (x @ self.weight).redistribute(self.mesh, self.placements)
            return y, {"plain": y.full_tensor(), "text": "kept", "count": y.detach().sum()}
        assert isinstance(x, DTensor) and x.placements == tuple(self.placements) and x.device_mesh == self.mesh
        assert isinstance(more["count"], DTensor) and more["text"] == "kept" and not more["count"].requires_grad
        y: Any = torch.tanh(x.redistribute(self.mesh, [Replicate()]) @ self.weight)
        return (y.sum() * more["count"]).full_tensor() + more["plain"].square().sum()


def expected(x, parts):
    first: Any
    second: Any
    first, second = (weight.clone().requires_grad_() for weight in weights())
    losses = []
    for part in x.chunk(parts):
        y = part @ first
        losses.append(torch.tanh(y @ second).sum() * y.detach().sum() + y.square().sum())
        (losses[-1] / parts).backward()
    return losses, (first.grad, second.grad)


@on_ranks(4)
@pytest.mark.parametrize("placements", [[Replicate()], [Shard(0)], [Shard(1)], [Partial()], [Partial("avg")]], ids=str)
def test_dtensors_keep_their_placements(placements):
    mesh: Any = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "tp"))
    stage, x = mesh["pp"].get_local_rank(), torch.randn(6, WIDTH, dtype=torch.float64).to(device_type())
    dist.broadcast(x, 0)
    half = Half(weights()[stage], mesh["tp"], placements, stage == 1)
    schedule = hp_pipeline.Schedule1F1B(PipelineStage(half, stage, 2), 3, group=mesh["pp"].get_group())
    losses, gradients = expected(x, 3)
    for _ in range(2):
        half.zero_grad()
        for loss, wanted in zip(schedule.run(x), losses if stage else [], strict=True):
            assert torch.allclose(loss, wanted, rtol=1e-12, atol=1e-12)
        assert half.weight.grad.placements == (Replicate(),)
        assert torch.allclose(half.weight.grad.full_tensor(), gradients[stage], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_two_stages_of_one_rank():
    mesh: Any = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = torch.ones(4, WIDTH, dtype=torch.float64).to(device_type()) / 3
    halves = [Half(weight, mesh, [Shard(1)], last) for last, weight in enumerate(weights())]
    stages = [PipelineStage(half, index, 2) for index, half in enumerate(halves)]
    alone = mesh_of_one()
    schedule = PipelineSchedule(stages, 2, placement=(0, 0), order=schedules.looped_bfs, group=alone)
    schedule.run(x)
    for half, gradient in zip(halves, expected(x, 2)[1], strict=True):
        assert torch.allclose(half.weight.grad.full_tensor(), gradient, rtol=1e-12, atol=1e-12)


def mesh_of_one():
    return init_device_mesh(device_type(), (2, 1), mesh_dim_names=("rest", "pp"))["pp"].get_group()


@on_ranks(4)
def test_dtensors_of_torch():
    mesh: Any = torch_mesh.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "tp"))
    stage, weight = mesh["pp"].get_local_rank(), weights()[0]
    x = torch.arange(4.0 * WIDTH, dtype=torch.float64).view(4, WIDTH).to(device_type()) / 20

    def first(x):
        parameter: Any = torch_tensor.DTensor.from_local(own.weight, mesh["tp"], [torch_tensor.Replicate()])
        rows: Any = torch_tensor.DTensor.from_local(x, mesh["tp"], [torch_tensor.Replicate()])
        y: Any = rows @ parameter
        return y.redistribute(mesh["tp"], [torch_tensor.Shard(1)])

    def last(x):
        assert x.placements == (torch_tensor.Shard(1),) and x.shape == (2, WIDTH)
        return (x.full_tensor() * own.weight).sum()

    own: Any = nn.ParameterDict({"weight": weight if stage == 0 else weight[0]})
    part = PipelineStage(last if stage else first, stage, 2, device=device_type(), mesh=mesh["tp"] if stage else None)
    hp_pipeline.ScheduleGPipe(part, 2, group=mesh["pp"].get_group()).run(x)
    one: Any
    other: Any
    one, other = weight.clone().requires_grad_(), weight[0].clone().requires_grad_()
    for rows in x.chunk(2):
        ((rows @ one * other).sum() / 2).backward()
    assert torch.allclose(own.weight.grad, (other if stage else one).grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_what_cannot_be_wrapped_again_is_named_on_all_ranks():
    rank = dist.get_rank()
    groups: list[Any] = [
        init_device_mesh(device_type(), (2, 1), mesh_dim_names=("pp", name))[name] for name in ("tp", "cp")
    ]
    layer = nn.Linear(2, 2).to(device_type())

    def first(x):
        return DTensor.from_local(layer(x), groups[0], [Replicate()])

    def last(x):
        return x.full_tensor().sum()

    x = torch.ones(2, 2).to(device_type())
    for mesh, known in ((None, "none"), (groups[1], r"DeviceMesh\(.*cp.*\)")):
        stage = PipelineStage([first, last][rank], rank, 2, device=device_type(), mesh=mesh)
        text = (
            r"rank 1 at 1F0: ValueError: the stage receives a DTensor of placements \(Replicate\(\),\) on a mesh of"
            rf" \(1,\) named \('tp',\), and has no such mesh \(known: {known}\)\. Pass PipelineStage\(..., mesh=\)"
        )
        with pytest.raises(PipelineError, match=text):
            hp_pipeline.ScheduleGPipe(stage, 1).run(x)
    stage = PipelineStage([first, last][rank], rank, 2, device=device_type(), mesh=groups[0])
    losses = hp_pipeline.ScheduleGPipe(stage, 1).run(x)
    plain = PipelineStage([layer, torch.sum][rank], rank, 2, device=device_type())
    torch.testing.assert_close(losses, hp_pipeline.ScheduleGPipe(plain, 1).run(x))


@on_ranks(4)
def test_axes_of_the_mesh_that_parameters_are_on():
    mesh: Any = init_device_mesh(device_type(), (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage, tp = mesh["pp"].get_local_rank(), mesh["tp"]
    own: Any = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64).to(device_type())
    with torch.no_grad():
        own.weight.copy_(weights()[0][:1])
    own.weight = nn.Parameter(hp_dtensor.distribute_tensor(own.weight, mesh["dp", "tp"], [Replicate(), Replicate()]))

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = own

        def forward(self, x):
            assert x.device_mesh == tp and x.placements == (Shard(0),)
            return (x.full_tensor() @ own.weight.full_tensor().t()).sum()

    scale: Any = torch.full((), 2.0, dtype=torch.float64, device=device_type(), requires_grad=True)

    def first(x):
        return DTensor.from_local(x * scale, tp, [Replicate()]).redistribute(tp, [Shard(0)])

    part = PipelineStage(Last() if stage else first, stage, 2, device=device_type())
    x = torch.ones(4, WIDTH, dtype=torch.float64).to(device_type())
    losses = hp_pipeline.ScheduleGPipe(part, 2, group=mesh["pp"].get_group()).run(x)
    total = weights()[0][:1].sum()
    if stage:
        assert [loss.item() for loss in losses] == pytest.approx([4 * total.item()] * 2)
    else:
        assert scale.grad.item() == pytest.approx(2 * total.item())


@on_ranks(4)
def test_ranks_of_another_place_are_refused():
    mesh: Any = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "tp"))
    rank, groups = dist.get_rank(), get_platform().groups
    stage = rank // 2
    scale = torch.ones((), device=device_type(), requires_grad=True)

    def work(x):
        return x.full_tensor().sum() if stage else DTensor.from_local(x * scale, mesh["tp"], [Replicate()])

    part = PipelineStage(work, stage, 2, device=device_type(), mesh=mesh["tp"] if stage else None)
    crossed = groups.new_group([0, 3] if rank in (0, 3) else [1, 2])
    text = r"from the rank at \(.,\) of it, but this rank is at \(.,\) of .*must join ranks of the same place"
    with pytest.raises(PipelineError, match=text):
        hp_pipeline.ScheduleGPipe(part, 1, group=crossed).run(torch.ones(2, 2, device=device_type()))
    losses = hp_pipeline.ScheduleGPipe(part, 1, group=mesh["pp"].get_group()).run(
        torch.ones(2, 2, device=device_type())
    )
    assert [loss.item() for loss in losses] == [4.0] * stage
