"""Stages on different numbers of ranks, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hp_pipeline
from hp_dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_pipeline import PipelineError, PipelineSchedule, PipelineStage, SharedParameterInfo, schedules
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]

WIDTH = 5


def weight(stage):
    generator = torch.Generator().manual_seed(stage)
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator).to(device_type())


def rows(count):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator).to(device_type())


class Part(nn.Module):
    """A stage on a mesh: a linear map of DTensors, columns over the ranks or a copy on each."""

    def __init__(self, stage, mesh, columns, returns, last):
        super().__init__()
        self.weight: Any = nn.Parameter(distribute_tensor(weight(stage), mesh, [Shard(1) if columns else Replicate()]))
        self.mesh, self.returns, self.last, self.seen = mesh, returns, last, []

    def forward(self, x: Any, note: Any = None):
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()])
        else:
            self.seen.append(x.placements)
            assert x.device_mesh == self.mesh and note["text"] == "kept" and note["count"].tolist() == [1, 2]
        y: Any = torch.tanh(x @ self.weight)
        if self.last:
            return y.square().sum(1).mean()
        note = {"text": "kept", "count": torch.arange(1, 3, device=x.device)}
        return y.redistribute(self.mesh, self.returns), note


def reference(stages, x, parts, links=None):
    weights = [weight(stage).requires_grad_() for stage in range(stages)]
    losses = []
    for part in x.chunk(parts):
        for each in weights:
            part = torch.tanh(part @ each)
        losses.append(part.square().sum(1).mean())
        (losses[-1] / parts).backward()
    gradients: list[Any] = [each.grad for each in weights]
    return losses, gradients


def compare(name, teams, returns, arrives, columns, micro_batches=3, count=6):
    """Run a pipeline whose stages are on teams of ranks."""
    rank = dist.get_rank()
    stage = next(index for index, team in enumerate(teams) if rank in team)
    mesh = DeviceMesh(device_type(), list(teams[stage]))
    part = Part(stage, mesh, columns[stage], returns[stage], stage == len(teams) - 1)
    own = PipelineStage(part, stage, len(teams), mesh=mesh, placements=arrives[stage])
    schedule = getattr(hp_pipeline, name)(own, micro_batches)
    x = rows(count)
    losses, gradients = reference(len(teams), x, micro_batches)
    for _ in range(2):
        part.zero_grad()
        for loss, wanted in zip(schedule.run(x), losses if part.last else [], strict=True):
            assert torch.allclose(loss.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
        assert torch.allclose(part.weight.grad.full_tensor(), gradients[stage], rtol=1e-12, atol=1e-12)
    assert set(part.seen) <= {tuple(arrives[stage] or ())}


@on_ranks(4)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZB1P"])
@pytest.mark.parametrize("arrives", [[Shard(0)], [Replicate()], [Shard(1)]], ids=["dp", "tp", "columns"])
def test_an_encoder_on_one_rank_and_a_model_on_three(name, arrives):
    compare(name, [(0,), (1, 2, 3)], [[Replicate()], None], [None, arrives], [False, arrives == [Replicate()]])


@on_ranks(4)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_from_two_ranks_to_one_and_on_to_another(placement):
    teams, one = [(1, 3), (0,), (2,)], [Replicate()]
    compare("Schedule1F1B", teams, [[placement], one, None], [None, one, one], [True, False, False], 5, 15)


@on_ranks(4)
def test_from_three_ranks_to_one_and_from_two_to_two():
    compare("ScheduleGPipe", [(0, 2, 3), (1,)], [[Shard(0)], None], [None, [Replicate()]], [False, False], 2, 10)
    # of the same size: whole, as pipelines that join ranks of one place do
    compare("Schedule1F1B", [(0, 1), (2, 3)], [[Shard(0)], None], [None, [Shard(1)]], [True, True], 2)


@on_ranks(4)
def test_chains_that_join_on_more_ranks():
    # Two encoders of one rank each, beside each other, and a model on two ranks.
    rank = dist.get_rank()
    teams = [(0,), (1,), (2, 3)]
    stage = min(rank, 2)
    mesh = DeviceMesh(device_type(), list(teams[stage]))
    own: Any = nn.Parameter(distribute_tensor(weight(stage), mesh, [Replicate()]))

    def encode(x):
        return DTensor.from_local(x, mesh, [Replicate()]) @ own

    def join(a, b):
        return (torch.tanh(a * b) @ own).square().sum(1).mean()

    part = PipelineStage(join if stage == 2 else encode, stage, 3, device=device_type(), mesh=mesh,
                         placements=[Shard(0)] if stage == 2 else None)  # fmt: skip
    PipelineSchedule(part, 2, order=schedules.gpipe, boundaries=[(0, 2), (1, 2)]).run(rows(6))
    weights = [weight(index).requires_grad_() for index in range(3)]
    for x in rows(6).chunk(2):
        ((torch.tanh((x @ weights[0]) * (x @ weights[1])) @ weights[2]).square().sum(1).mean() / 2).backward()
    gradient = weights[stage].grad
    assert gradient is not None
    assert torch.allclose(own.grad.full_tensor(), gradient, rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_what_does_not_go_between_stages_of_several_ranks_is_named_on_all():
    rank = dist.get_rank()
    mesh = DeviceMesh(device_type(), [0, 1] if rank < 2 else [2])
    layer: Any = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).to(device_type())
    outputs = {
        "a plain tensor that needs a gradient, and one of the stages is on several ranks": lambda y: y,
        "only shards and replicated axes do": lambda y: DTensor.from_local(y, mesh, [Partial()]),
        r"comes to a mesh of \(1,\); say how it arrives there": lambda y: DTensor.from_local(y, mesh, [Shard(0)]),
    }
    for text, make in outputs.items():
        placements = [Replicate()] if rank == 2 and "comes to" not in text else None
        work: Any = (lambda x: x.full_tensor().sum()) if rank == 2 else (lambda x, make=make: make(layer(x)))
        stage = PipelineStage(work, rank // 2, 2, device=device_type(), mesh=mesh, placements=placements)
        schedule = hp_pipeline.Schedule1F1B(stage, 2)
        for _ in range(2):
            with pytest.raises(PipelineError, match=text):
                schedule.run(rows(4))
    mended = {
        "a plain": lambda y: DTensor.from_local(y, mesh, [Replicate()]),
        "a partial": lambda y: DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[Replicate()]),
        "said": lambda y: DTensor.from_local(y, mesh, [Shard(0)]),
    }
    for make in mended.values():
        work = (lambda x: x.full_tensor().sum()) if rank == 2 else (lambda x, make=make: make(layer(x)))
        stage = PipelineStage(work, rank // 2, 2, device=device_type(), mesh=mesh, placements=[Replicate()])
        hp_pipeline.Schedule1F1B(stage, 2).run(rows(4))


@on_ranks(3)
def test_a_rank_that_fails_alone_is_named_and_the_next_run_works():
    rank = dist.get_rank()
    mesh = DeviceMesh(device_type(), [0, 1] if rank < 2 else [2])
    own: Any = nn.Parameter(weight(rank // 2))
    failing = [True]

    def first(x):
        if rank == 1 and failing:
            raise ArithmeticError("too hot")
        return DTensor.from_local(x @ own, mesh, [Replicate()])

    def last(x):
        return (x.to_local() @ own).sum()

    work = last if rank == 2 else first
    stage = PipelineStage(work, rank // 2, 2, device=device_type(), mesh=mesh, placements=[Replicate()])
    schedule = hp_pipeline.Schedule1F1B(stage, 3)
    for _ in range(2):
        failing.append(True)
        with pytest.raises(PipelineError, match="rank 1 at 0F0: ArithmeticError: too hot"):
            schedule.run(rows(6))
        failing.clear()
        setattr(own, "grad", None)  # noqa: B010
        schedule.run(rows(6))
        one, other = weight(0).requires_grad_(), weight(1).requires_grad_()
        (rows(6) @ one @ other).sum().div(3).backward()
        wanted: Any = (other if rank == 2 else one).grad
        gradient: Any = own.grad
        assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-12)


@on_ranks(3)
@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_that_one_rank_of_a_stage_alone_has(uses):
    rank = dist.get_rank()
    mesh = DeviceMesh(device_type(), [1, 2] if rank else [0])
    own: Any = nn.Parameter(weight(0))

    def first(x):
        return DTensor.from_local(x @ own, mesh, [Replicate()])

    def last(x):
        return (x.to_local() * own.sum() if rank == uses else own).sum()

    stage = PipelineStage(last if rank else first, min(rank, 1), 2, device_type(), mesh=mesh, placements=[Shard(0)])
    hp_pipeline.ScheduleGPipe(stage, 2).run(rows(8))
    if rank == 0:
        half = slice(2 * (uses - 1), 2 * uses)
        expected = sum(part[half].sum(0)[:, None].expand(WIDTH, WIDTH) for part in rows(8).chunk(2)) * own.sum() / 2
        assert torch.allclose(own.grad, expected, rtol=1e-12, atol=1e-12)


@on_ranks(3)
def test_ranks_that_are_not_the_meshes_are_refused_on_all():
    rank = dist.get_rank()
    mesh = DeviceMesh(device_type(), [rank])
    stage = PipelineStage(nn.Linear(2, 2).to(device_type()), rank // 2, 2, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"stage 0 is on the ranks \[0, 1\] of the pipeline, with the meshes \['\(1,\)'\]"
    ):
        hp_pipeline.Schedule1F1B(stage, 2).run(torch.ones(2, 2, device=device_type()))
    joined = DeviceMesh(device_type(), [0, 1] if rank < 2 else [2])
    layer = torch.nn.Parameter(torch.full((2,), 3.0, device=device_type()))
    work: Any = (lambda x: x.to_local().sum()) if rank == 2 else lambda x: DTensor.from_local(x * layer, joined)
    parts = PipelineStage(work, rank // 2, 2, device=device_type(), mesh=joined, placements=[Replicate()])
    losses = hp_pipeline.Schedule1F1B(parts, 2).run(torch.ones(2, 2, device=device_type()))
    assert [loss.item() for loss in losses] == ([6.0, 6.0] if rank == 2 else [])
    shared = [SharedParameterInfo("weight", (0, 1))]
    stage = PipelineStage(nn.Linear(2, 2).to(device_type()), rank // 2, 2, mesh=mesh, shared_parameters=shared)
    with pytest.raises(
        NotImplementedError, match="3 ranks run the 2 ranks of a pipeline; weights that its stages share"
    ):
        hp_pipeline.Schedule1F1B(stage, 2)
    if rank != 1:
        hp_pipeline.Schedule1F1B(stage, 2, group=get_platform().groups.new_group([0, 2]))
    stage = PipelineStage(nn.Linear(2, 2).to(device_type()), rank // 2, 2)
    with pytest.raises(
        ValueError, match="on 3 ranks has 3 stages, stage_num is 2; .* For stages on several ranks pass mesh="
    ):
        hp_pipeline.Schedule1F1B(stage, 2)
    hp_pipeline.Schedule1F1B(PipelineStage(stage.submodule, rank // 2, 2, mesh=mesh), 2)
