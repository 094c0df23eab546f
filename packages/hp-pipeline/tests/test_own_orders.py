"""Orders of a user's own, and options that change a schedule's order, against one process in float64."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from pipeline_models import Net, Stage, batch, reference
from test_running import close

from hp_pipeline import (
    MetaStepType,
    PipelineSchedule,
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleZB1P,
    ScheduleZBV,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def compare(make, stages, micro_batches, exact=True):
    net = Net(stages).double().to(device_type())
    schedule = make(net)
    x, target = batch(2 * micro_batches, device_type())
    losses = schedule.run(x, target=target)
    whole, expected = reference(stages, 2 * micro_batches, micro_batches, steps=1)
    for loss, wanted in zip(losses, expected[0], strict=bool(losses)):
        close(loss, wanted, exact)
    weights = dict(whole.named_parameters())
    for stage in schedule.stages:
        for key, parameter in stage.submodule.named_parameters():
            close(parameter.grad, weights[key].grad, exact)
    return schedule


def stage_of(net, index):
    return PipelineStage(Stage(net, index), index, len(net.parts))


@on_ranks(2)
def test_an_order_as_text():
    rank = dist.get_rank()
    order = {0: "0F0 0F1 0B0 0I1 0W1", 1: "1F0 1B0 1F1 1I1 1W1"}
    schedule = compare(
        lambda net: PipelineSchedule.from_steps(order, stage_of(net, rank)), 2, 2, device_type() == "cpu"
    )
    again = PipelineSchedule.from_steps(schedule.exec_order, schedule.stages, scale_grads=False)
    assert again.exec_order == schedule.exec_order and again.micro_batch_num == 2 and not again.scale_grads
    own = [stage_of(Net(3).to(device_type()), index) for index in ((0, 2), (1,))[rank]]
    bent = PipelineSchedule.from_steps({0: "0F0 2F0 2B0 0B0", 1: "1F0 1B0"}, own)
    assert bent.pipeline.placement == (0, 1, 0)


@on_ranks(2)
def test_a_rank_may_take_micro_batches_in_another_order_than_they_come():
    rank = dist.get_rank()
    order = {0: "0F0 0F2 0F1 0B0 0B2 0B1", 1: "1F0 1B0 1F1 1F2 1B1 1B2"}
    compare(lambda net: PipelineSchedule.from_steps(order, stage_of(net, rank)), 2, 3, exact=False)


@on_ranks(2)
def test_orders_that_are_no_schedule():
    stage = stage_of(Net(2).to(device_type()), dist.get_rank())
    with pytest.raises(ValueError, match=r"the ranks \[0, 1\] both run stage 0, at 0B0"):
        PipelineSchedule.from_steps({0: "0F0", 1: "1F0 1B0 0B0"}, stage)
    with pytest.raises(ValueError, match=r"the steps name the stages \[0, 2\], not all from 0"):
        PipelineSchedule.from_steps({0: "0F0 0B0", 1: "2F0 2B0"}, stage)
    with pytest.raises(ValueError, match="'0G0' is not a step"):
        PipelineSchedule.from_steps({0: "0F0 0G0", 1: "1F0 1B0"}, stage)
    with pytest.raises(ValueError, match="steps that are missing: 1B0"):
        PipelineSchedule.from_steps({0: "0F0 0B0", 1: "1F0"}, stage)


@on_ranks(2)
@pytest.mark.parametrize("split", [False, True])
def test_interleaved_in_pairs(split):
    def make(net):
        stages = [stage_of(net, index) for index in (dist.get_rank(), dist.get_rank() + 2)]
        return ScheduleInterleaved1F1B(stages, 5, overlap_b_f=True, enable_dxdw_split=split)

    schedule = compare(make, 4, 5, device_type() == "cpu")
    kinds = [step.step_type for step in schedule.exec_order[dist.get_rank()]]
    assert kinds.count(MetaStepType.OVERLAP_B_F) >= 4
    assert (MetaStepType.BACKWARD_WEIGHT in kinds, MetaStepType.BACKWARD in kinds) == (split, not split)
    with pytest.raises(ValueError, match="enable_dxdw_split=True .* needs overlap_b_f=True"):
        ScheduleInterleaved1F1B(schedule.stages, 5, enable_dxdw_split=True)
    for kind, indices in ((ScheduleZB1P, (dist.get_rank(),)), (ScheduleZBV, (dist.get_rank(), 3 - dist.get_rank()))):
        net = Net(2 * len(indices)).to(device_type())
        order = kind([stage_of(net, index) for index in indices], 5).exec_order[dist.get_rank()]
        assert any(step.step_type is MetaStepType.BACKWARD_WEIGHT for step in order)
