"""Saved tensors on the host between forward and backward."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from pipeline_models import Net, Stage, batch
from torch import nn

import hp_pipeline
from hp_offload import SwapManager
from hp_pipeline import MetaStepType, PipelineStage, check, lower, placed
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

MICRO_BATCHES = 5


def trained(name, stages, **options):
    """Return the gradients of two runs, the losses, and the schedule."""
    kind = getattr(hp_pipeline, name)
    net = Net(stages).double().to(device_type())
    own = [index for index, place in enumerate(placed(kind.shape, 2)) if place == dist.get_rank()]
    parts = [PipelineStage(Stage(net, index), index, stages) for index in own]
    schedule = kind(parts, MICRO_BATCHES, **options)
    x, target = batch(2 * MICRO_BATCHES, device_type())
    losses = [schedule.run(x, target=target) for _ in range(2)]
    modules = nn.ModuleList(stage.submodule for stage in parts)
    return [parameter.grad for parameter in modules.parameters()], losses, schedule


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "stages"), [("ScheduleGPipe", 2), ("Schedule1F1B", 2), ("ScheduleZB1P", 2), ("ScheduleZBV", 4)]
)
def test_swapping_changes_no_bit(name, stages):
    expected, losses, _ = trained(name, stages)
    manager = SwapManager()
    with manager.record() as events:
        gradients, swapped_losses, schedule = trained(name, stages, swap=True)
    assert all(map(torch.equal, gradients, expected))
    for one, other in zip(losses, swapped_losses, strict=True):
        assert all(map(torch.equal, one, other))
    own = range(len(schedule.pipeline.placement))
    order = lower(schedule.exec_order, schedule.pipeline, swapped=own)
    moved = [each for each in order[dist.get_rank()] if each.step_type is MetaStepType.OFFLOAD]
    kinds = ["launch_offload", "wait_offload", "launch_load", "wait_load"]
    assert {kind: sum(what == kind for what, _ in events) for kind in kinds} == dict.fromkeys(kinds, 2 * len(moved))
    assert moved or (name in ("Schedule1F1B", "ScheduleZB1P") and dist.get_rank()), "backward follows at once"
    if name == "ScheduleGPipe":
        plain = check(schedule.exec_order, schedule.pipeline)
        assert max(check(order, schedule.pipeline)) == 3 < max(plain) == MICRO_BATCHES


@on_ranks(2)
def test_memory_is_on_the_host():
    rank = dist.get_rank()
    away = {}

    def custom(step, run):
        run()
        away[str(step)[1:]] = SwapManager().host_bytes

    net = Net(2).double().to(device_type())
    stage = PipelineStage(Stage(net, rank), rank, 2)
    schedule = hp_pipeline.ScheduleGPipe(stage, 3, swap=SwapManager())
    for kind in (MetaStepType.FORWARD, MetaStepType.WAIT_OFFLOAD):
        schedule.register_custom_function(kind, custom)
    SwapManager().release_host_memory()
    x, target = batch(6, device_type())
    schedule.run(x, target=target)
    assert away["F0"] == 0 < away["SW0"] < away["SW1"]


@on_ranks(1)
def test_what_cannot_move_saved_tensors_is_refused(monkeypatch):
    stage = PipelineStage(nn.Linear(2, 2), 0, 1)
    with pytest.raises(TypeError, match=r"swap is True, False, or an object with a method saving\(name, module\)"):
        hp_pipeline.ScheduleGPipe(stage, 2, swap="cpu")
    monkeypatch.setitem(sys.modules, "hp_offload", None)
    with pytest.raises(ModuleNotFoundError, match="swap=True moves saved tensors by hp-offload, which is not in"):
        hp_pipeline.ScheduleGPipe(stage, 2, swap=True)
    own = Moves()
    stage = PipelineStage(lambda x: (x * x).sum(), 0, 1, device=device_type())
    hp_pipeline.ScheduleGPipe(stage, 2, swap=own).run(torch.ones(2, 1, device=device_type(), requires_grad=True))
    assert own.named == ["0F0", "0F1"]
    assert sorted(own.done) == sorted(2 * ["launch_offload", "wait_offload", "launch_load", "wait_load"])


class Moves:
    """A swapper of one's own, which moves nothing."""

    def __init__(self):
        self.named, self.done = [], []

    @contextlib.contextmanager
    def saving(self, name, module):
        self.named.append(name)
        yield self

    def __getattr__(self, name):
        return lambda: self.done.append(name)
