"""Weights that several stages share, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear

import hp_pipeline
from hp_pipeline import PipelineSchedule, PipelineStage, SharedParameterInfo, placed, schedules
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

CLASSES, WIDTH = 7, 6


class Table(nn.Module):
    """A stage of a language model whose embedding is its output layer, and a middle that uses it or not."""

    def __init__(self, index, stages, table=None, uses=True):
        super().__init__()
        torch.manual_seed(10 + index)
        self.index, self.stages, self.uses = index, stages, uses
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.table = nn.Parameter(torch.randn(CLASSES, WIDTH, dtype=torch.float64)) if table is None else table
        self.to(device_type())

    def forward(self, x, target=None):
        if self.index == 0:
            x = embedding(x, self.table)
        x = torch.tanh(self.layer(x))
        if self.index < self.stages - 1:
            return x + self.table.sum(0) if 0 < self.index and self.uses else x
        return cross_entropy(linear(x, self.table), target)


def tokens(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CLASSES, (2, rows), generator=generator).to(device_type())


def whole(stages, rows, micro_batches, steps, runs=1, uses=True):
    """Train in one process; return the modules, which have one table."""
    modules = [Table(0, stages, uses=uses)]
    modules += [Table(index, stages, modules[0].table, uses) for index in range(1, stages)]
    optimizer = torch.optim.SGD(nn.ModuleList(modules).parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(runs):
            for x, target in zip(*(row.chunk(micro_batches) for row in tokens(rows)), strict=True):
                for module in modules[:-1]:
                    x = module(x)
                (modules[-1](x, target) / micro_batches).backward()
        optimizer.step()
    return modules


def assert_same(name, shape, stages, runs=1, uses=True, micro_batches=3):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    placement = placed(shape, ranks, stages // ranks if shape == "loop" else None)
    info = SharedParameterInfo("table", tuple(range(stages)))
    own = {}
    for index in [index for index, place in enumerate(placement) if place == rank]:
        own[index] = Table(index, stages, next((each.table for each in own.values()), None), uses)
    parts = [PipelineStage(module, index, stages, shared_parameters=[info]) for index, module in own.items()]
    schedule = getattr(hp_pipeline, name)(parts, micro_batches)
    optimizer = torch.optim.SGD(nn.ModuleList(own.values()).parameters(), lr=0.1)
    x, target = tokens(2 * micro_batches)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(runs):
            schedule.run(x, target=target)
        optimizer.step()
    expected = whole(stages, 2 * micro_batches, micro_batches, 2, runs, uses)
    for index, module in own.items():
        for one, other in zip(module.parameters(), expected[index].parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
            assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    everyone = [torch.empty_like(own[min(own)].table) for _ in range(ranks)]
    for tensor in (own[min(own)].table.detach(), own[min(own)].table.grad):
        dist.all_gather(everyone, tensor)
        assert all(torch.equal(each, tensor) for each in everyone)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "shape"), [("Schedule1F1B", "line"), ("ScheduleInterleaved1F1B", "loop"), ("ScheduleZBV", "v")]
)
def test_a_table_of_all_stages(name, shape):
    assert_same(name, shape, 2 if shape == "line" else 4)


@on_ranks(2)
def test_gradients_of_several_runs_add_up():
    assert_same("Schedule1F1B", "line", 2, runs=3)


@on_ranks(3)
@pytest.mark.parametrize("uses", [True, False])
def test_three_copies_of_which_one_gets_a_gradient_or_not(uses):
    assert_same("ScheduleZB1P", "line", 3, uses=uses)


class Scaled(nn.Module):
    def __init__(self, weight, last):
        super().__init__()
        self.weight, self.last = weight, last

    def forward(self, x):
        y = x * self.weight.sum()
        return y.sum() if self.last else y


def schedule_of(weight, info, **more):
    rank = dist.get_rank()
    module = Scaled(weight, rank == 1)
    stage = PipelineStage(module, rank, 2, shared_parameters=[] if info is None else [info], **more)
    return PipelineSchedule(stage, 2, order=schedules.gpipe)


@on_ranks(2)
def test_what_differs_is_refused_on_all_ranks():
    rank, x = dist.get_rank(), torch.ones(2, 1)
    info = SharedParameterInfo("weight", (1, 0))
    cases = [
        (nn.Parameter(torch.ones(2 + rank)), info,
         r"weight 'weight' that the stages \(1, 0\) share is torch.float32 of shape \(2,\) on stage 0, but"
         r" torch.float32 of shape \(3,\) on stage 1. It must have the same shape, dtype and layout"),
        (nn.Parameter(torch.ones(2, dtype=[torch.float32, torch.float64][rank])), info,
         r"float32 of shape \(2,\) on stage 0, but torch.float64"),
        (nn.Parameter(torch.ones(2), requires_grad=rank == 0), info, r"of shape \(2,\), frozen on stage 1"),
        (nn.Parameter(torch.ones(2)), [info, None][rank],
         r"stages \(1, 0\) share is not listed by stage 1: pass SharedParameterInfo\(..., \(1, 0\)\)"),
        (nn.Parameter(torch.ones(2)), SharedParameterInfo(["weight", "wait"][rank], (0, 1)),
         r"stage 1 has no parameter 'wait'; the stage's module has \['weight'\]"),
        (nn.Parameter(torch.ones(2)), SharedParameterInfo(nn.Parameter(torch.ones(2)), (0, 1)),
         "stage 0 has a Parameter that is not in the stage's module; name it"),
    ]  # fmt: skip
    for weight, each, text in cases:
        with pytest.raises(ValueError, match=text):
            schedule_of(weight, each).run(x)
    with torch.device("meta"):
        late = nn.Parameter(torch.ones(2))
    schedule = schedule_of(late, info, device=device_type())
    with pytest.raises(ValueError, match="a parameter on the meta device: initialise it before the first"):
        schedule.run(x)
    schedule.stages[0].submodule.weight = nn.Parameter(torch.ones(2))
    own = nn.Parameter(torch.ones(2))
    present = schedule_of(own, SharedParameterInfo(own, (1, 0)))
    for each in (schedule, schedule_of(nn.Parameter(torch.ones(2)), info), present):
        assert [loss.item() for loss in each.run(x)] == ([4.0, 4.0] if rank else [])


@on_ranks(2)
def test_the_first_of_the_stages_gives_the_values():
    rank = dist.get_rank()
    weight = nn.Parameter(torch.full((2,), 3.0 + rank))
    schedule = schedule_of(weight, SharedParameterInfo(weight, (1, 0)), has_backward=False)
    outputs = schedule.run(torch.ones(2, 1))
    assert weight.tolist() == [4.0, 4.0]
    assert not rank or [output.item() for output in outputs] == [64.0, 64.0]


def two_copies():
    rank, info = dist.get_rank(), SharedParameterInfo("table", (0, 1))
    module = Table(rank, 2)
    return rank, module, hp_pipeline.Schedule1F1B(PipelineStage(module, rank, 2, shared_parameters=[info]), 3)


@on_ranks(2)
def test_a_copy_that_is_loaded_alone_is_refused_on_all_ranks():
    rank, module, schedule = two_copies()
    x, target = tokens(6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        schedule.run(x, target=target)
        optimizer.step()
    kept = module.table.detach().clone()
    if rank:
        with torch.no_grad():
            module.table.mul_(2)
    with pytest.raises(
        ValueError, match=r"the weight 'table' that stages \(0, 1\) share has other values than on stage 0"
    ):
        schedule.run(x, target=target)
    with torch.no_grad():
        module.table.copy_(kept)  # by a second write on one rank, which the values decide
    schedule.run(x, target=target)
    optimizer.step()
    if not rank:
        with torch.no_grad():
            module.table.add_(0.0)
    schedule.run(x, target=target)


@on_ranks(2)
def test_a_copy_that_is_frozen_alone_is_refused_on_all_ranks():
    rank, module, schedule = two_copies()
    x, target = tokens(6)
    schedule.run(x, target=target)
    module.table.requires_grad_(rank == 1)
    with pytest.raises(ValueError, match=r"share is .*, frozen on stage 0, but torch.float64 of shape .* on stage 1"):
        schedule.run(x, target=target)
    module.table.requires_grad_(False)
    module.zero_grad()
    schedule.run(x, target=target)
    assert module.table.grad is None and module.layer.weight.grad is not None


def test_infos_that_name_no_others():
    with pytest.raises(ValueError, match=r"shared_stage lists two stages or more, each once, .* got \(1, 1\)"):
        SharedParameterInfo("weight", (1, 1))
    info = SharedParameterInfo("weight", (0, 3))
    with pytest.raises(ValueError, match=r"of stage 0 must name this stage and others below stage_num=3"):
        PipelineStage(nn.Linear(1, 1), 0, 3, shared_parameters=[info])
    assert PipelineStage(nn.Linear(1, 1), 0, 4, shared_parameters=[info]).stage_num == 4
    with pytest.raises(ValueError, match="of stage 1 must name this stage .*; stages that do not have the weight"):
        PipelineStage(nn.Linear(1, 1), 1, 4, shared_parameters=[info])
    assert PipelineStage(nn.Linear(1, 1), 1, 4).stage_index == 1


@on_ranks(2)
def test_stages_of_one_rank_have_one_object():
    rank = dist.get_rank()
    info = SharedParameterInfo("table", (0, 1, 2, 3))
    parts = [PipelineStage(Table(index, 4), index, 4, shared_parameters=[info]) for index in ((0, 3), (1, 2))[rank]]
    x, target = tokens(4)
    with pytest.raises(
        ValueError, match="stage 2 has a Parameter of its own, but stage 1 is on the same rank: use one"
    ):
        hp_pipeline.ScheduleZBV(parts, 2).run(x, target=target)
    parts[1].submodule.table = parts[0].submodule.table
    hp_pipeline.ScheduleZBV(parts, 2).run(x, target=target)
