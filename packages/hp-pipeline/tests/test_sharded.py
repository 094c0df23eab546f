"""Stages whose parameters are sharded, by hp-fsdp and by torch's FSDP2, against one process in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pipeline_models import Net, Stage
from sharded_stages import GATHER, KINDS, Reductions, assert_close, build, meshes, modules_of, own_rows, shard, trained

from hp_pipeline import (
    MetaStepType,
    PipelineError,
    lower,
)
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("Schedule1F1B", 2),
        ("ScheduleZB1P", 2),
        ("ScheduleInterleaved1F1B", 4),
        ("ScheduleZBV", 4),
        ("ScheduleDualPipeV", 4),
    ],
)
def test_sharded_stages_equal_one_process(name, stages, kind):
    schedule, groups = build(name, stages, 3, kind)
    own = modules_of(schedule)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    x, target = own_rows(schedule)
    for _ in range(2):
        optimizer.zero_grad()
        with Reductions() as reductions:
            schedule.run(x, target=target)
        assert reductions.number == groups
        optimizer.step()
    assert_close(schedule, trained(stages, 2))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_between_a_run_and_the_optimizer_leaves_nothing_of_before(kind):
    schedule, _ = build("Schedule1F1B", 2, 3, kind)
    own = modules_of(schedule)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    x, target = own_rows(schedule)
    for _ in range(2):
        optimizer.zero_grad()
        schedule.run(x, target=target)
        with torch.no_grad():
            own[0](x if schedule.stages[0].is_first_stage else x.new_ones(2, 6))
        optimizer.step()
    assert_close(schedule, trained(2, 2))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_gathered_as_long_as_the_schedule_says(kind):
    schedule, _ = build("ScheduleInterleaved1F1B", 4, 2, kind)
    x, target = own_rows(schedule)
    whole = {id(stage): dict(Net(4).named_parameters()) for stage in schedule.stages}
    seen = []

    def custom(step, run):
        run()
        for stage in schedule.stages:
            gathered = {
                tuple(parameter.shape) == tuple(whole[id(stage)][name].shape) and not hasattr(parameter, "placements")
                for name, parameter in stage.submodule.named_parameters()
            }
            seen.append((str(step), stage.stage_index, gathered))

    for step_type in (MetaStepType.FORWARD, MetaStepType.BACKWARD, MetaStepType.RESHARD):
        schedule.register_custom_function(step_type, custom)
    schedule.run(x, target=target)
    assert seen
    for step, stage, gathered in seen:
        assert gathered == {"FRS" not in step and step.startswith(str(stage))}, (step, stage)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "place"), [("Schedule1F1B", "0B1"), ("ScheduleZB1P", "1F1"), ("ScheduleZB1P", "0W1")])
def test_a_stage_that_raises_on_one_rank_or_all_leaves_the_next_run_working(name, place, kind):
    schedule, groups = build(name, 2, 3, kind)
    x, target = own_rows(schedule)
    failing: list[set[int]] = []

    def custom(step, run):
        if failing and str(step) == place and dist.get_rank() % 2 in failing[0]:
            raise ArithmeticError("too hot")
        run()

    for step_type in (MetaStepType.FORWARD, MetaStepType.BACKWARD, MetaStepType.BACKWARD_WEIGHT):
        schedule.register_custom_function(step_type, custom)
    schedule.run(x, target=target)
    own = modules_of(schedule)
    for shards in ({0, 1}, {1}):
        failing.append(shards)
        if dist.get_rank() % 2 in shards:
            with pytest.raises(PipelineError, match=f"{place}: ArithmeticError: too hot"):
                schedule.run(x, target=target)
        else:
            schedule.run(x, target=target)
        failing.clear()
        own.zero_grad()
        with Reductions() as reductions:
            schedule.run(x, target=target)
        assert reductions.number == groups
        assert_close(schedule, trained(2, 1, lr=0.0))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_that_raises_before_its_first_forward_leaves_no_other_waiting(kind):
    schedule, _ = build("ScheduleZBV", 4, 2, kind)
    x, target = own_rows(schedule)
    failing = [dist.get_rank() == 3]

    def custom(step, run):
        if failing[0]:
            raise ArithmeticError("too hot")
        run()

    schedule.register_custom_function(MetaStepType.FORWARD, custom)
    if dist.get_rank() % 2:
        with pytest.raises(PipelineError, match="ArithmeticError: too hot"):
            schedule.run(x, target=target)
    else:
        schedule.run(x, target=target)
    failing[0] = False
    modules_of(schedule).zero_grad()
    schedule.run(x, target=target)
    assert_close(schedule, trained(4, 1, lr=0.0))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_orders_with_steps_of_sharding(kind):
    schedule, groups = build("Schedule1F1B", 2, 2, kind)
    x, target = own_rows(schedule)
    computing = schedule.exec_order
    schedule.exec_order = lower(computing, schedule.pipeline)
    with pytest.raises(
        ValueError, match=r"The parameters of the stages \[\d\] are sharded, but exec_order has no REDUCE"
    ):
        schedule.run(x, target=target)
    for order in (computing, lower(computing, schedule.pipeline, sharded=[0, 1])):
        schedule.exec_order = order
        modules_of(schedule).zero_grad()
        with Reductions() as reductions:
            schedule.run(x, target=target)
        assert reductions.number == groups
        assert_close(schedule, trained(2, 1, lr=0.0))


@on_ranks(4)
def test_deterministic_shards_give_the_bits_of_one_pipeline_stage():
    micro_batches = 2
    net = Net(2).double().to(device_type())
    _, mesh = meshes("ours")
    stages = [Stage(net, index) for index in range(2)]
    for stage in stages:
        shard(stage, mesh, "ours", deterministic=True)
    schedule, groups = build("Schedule1F1B", 2, micro_batches, "ours", deterministic=True)
    x, target = own_rows(schedule)
    for micro, (a, b) in enumerate(zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True)):
        for stage in stages:
            stage.set_requires_gradient_sync(micro == micro_batches - 1)
        (stages[1](stages[0](a), b) / micro_batches).backward()
    for _ in range(2):
        schedule.run(x, target=target)
        for stage in schedule.stages:
            expected = dict(stages[stage.stage_index].named_parameters())
            for name, parameter in stage.submodule.named_parameters():
                assert torch.equal(parameter.grad.full_tensor(), expected[name].grad.full_tensor()), name
            stage.submodule.zero_grad()
    split, _ = build("ScheduleZB1P", 2, micro_batches, "ours", deterministic=True)
    with pytest.raises(PipelineError, match="puts its weights' gradients off"):
        split.run(x, target=target)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_runs_add_up_with_no_further_gathers(kind):
    schedule, _ = build("ScheduleZBV", 4, 2, kind)
    x, target = own_rows(schedule)
    gathers = []
    for _ in range(2):
        with count_collectives() as counts, mock.patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as calls:
            schedule.run(x, target=target)
        gathers.append(counts["all_gather"] + calls.call_count)
    assert gathers[0] == gathers[1] + 1, "in the first run the pipeline's ranks compare their stages"
    expected = trained(4, 1, lr=0.0)
    for stage in schedule.stages:
        for name, parameter in stage.submodule.named_parameters():
            twice = 2 * expected[name].grad
            assert torch.allclose(parameter.grad.full_tensor(), twice, rtol=1e-12, atol=1e-12), name
