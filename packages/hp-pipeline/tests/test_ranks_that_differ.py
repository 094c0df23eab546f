"""What one rank does alone: all ranks raise or none, none waits, and nothing of a run is left in the next."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pipeline_models import Net, batch
from test_running import build, compare_step
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hp_pipeline
from hp_dtensor import DeviceMesh, DTensor, Replicate
from hp_pipeline import MetaStepType, PipelineError, PipelineStage, SharedParameterInfo
from hp_platform import get_platform
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


class Scale(nn.Module):
    """Multiplies by a weight; then a function, or the sum in the last stage."""

    def __init__(self, then=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.then = then or (lambda x: x)
        self.to(device_type())

    def forward(self, *x):
        return self.then(x[0] * self.weight)


def schedule_of(then, micro_batches=2, **options):
    """Return a pipeline of two stages, the first of which ends with a function."""
    rank = dist.get_rank()
    stage = PipelineStage(Scale((lambda x: x.sum()) if rank else then), rank, 2, **options)
    return hp_pipeline.ScheduleGPipe(stage, micro_batches), stage.submodule


def rows(number):
    return torch.arange(2.0 * number, device=device_type()).view(number, 2)


@on_ranks(2)
@pytest.mark.parametrize("alone", [0, 1])
def test_a_function_registered_on_one_rank_after_a_run(alone):
    net = Net(2).double().to(device_type())
    schedule = build("Schedule1F1B", 2, net)
    x, target = batch(4, device_type())
    # One rank without inputs of its own, so that nothing but the function is new there.
    inputs: Any = ((x,), {}) if dist.get_rank() == 0 else ((), {"target": target})
    steps = []
    for turn in range(3):
        if turn and dist.get_rank() == alone:
            schedule.register_custom_function(MetaStepType.FORWARD, lambda step, run: (steps.append(step), run()))
        net.zero_grad()
        compare_step(schedule, schedule.run(*inputs[0], **inputs[1]), 2, 4, 2)
    assert len(steps) == (4 if dist.get_rank() == alone else 0)


@on_ranks(2)
@pytest.mark.parametrize("declared", [0, 1])
def test_shapes_that_change_are_declared_by_one_of_two_stages(declared):
    schedule, module = schedule_of(lambda x: x[:, : int(x[0, 0]) + 1], dyn_shape=dist.get_rank() == declared)
    if dist.get_rank():
        module.weight.data = torch.ones((), device=device_type())
    x = torch.tensor([[0.0, 5.0], [1.0, 5.0]], device=device_type())
    for _ in range(2):
        losses = schedule.run(x)
        assert [loss.item() for loss in losses] == ([0.0, 18.0] if dist.get_rank() else [])


class Opaque:
    """A value that pickle refuses."""

    def __reduce__(self):
        raise AttributeError("no bytes of this")


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("opaque", ".* which pickle cannot write for the next rank: no bytes of this. Return tensors and plain values"),
        ("meta", r"a tensor on meta, but its messages are on .*: move it, or PipelineStage\(device=\)"),
    ],
)
def test_what_cannot_be_sent_is_named_on_all_ranks(kind, text):
    failing = [True]

    def then(x):
        more = Opaque() if kind == "opaque" else x.detach().to("meta")
        return (x, more) if failing else x

    schedule, module = schedule_of(then)
    text = f"rank 0 at 0F0: TypeError: stage 0 -> stage 1, forward: the stage returned {text}"
    for _ in range(2):
        with pytest.raises(PipelineError, match=text):
            schedule.run(rows(2))
    failing.clear()
    module.zero_grad()
    losses = schedule.run(rows(2))
    assert [loss.item() for loss in losses] == ([9.0, 45.0] if dist.get_rank() else [])


@on_ranks(2)
@pytest.mark.parametrize("dyn_shape", [False, True])
def test_an_object_that_holds_a_tensor_is_refused_on_all_ranks(dyn_shape):
    failing = [True]
    schedule, _ = schedule_of(lambda x: (x, SimpleNamespace(hidden=x)) if failing else x, dyn_shape=dyn_shape)
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"which pickle cannot write .*: it has an object that holds a tensor"):
            schedule.run(rows(2))
    failing.clear()
    assert [loss.item() for loss in schedule.run(rows(2))] == ([9.0, 45.0] if dist.get_rank() else [])


@on_ranks(2)
def test_an_array_beside_a_tensor_needs_messages_that_may_differ():
    schedule, _ = schedule_of(lambda x: (x, np.ones(2)), dyn_shape=False)
    with pytest.raises(PipelineError, match=r"Messages that differ need PipelineStage\(..., dyn_shape=True\)"):
        schedule.run(rows(2))
    schedule, _ = schedule_of(lambda x: (x, np.ones(2)), dyn_shape=True)
    assert [loss.item() for loss in schedule.run(rows(2))] == ([9.0, 45.0] if dist.get_rank() else [])


class Wrap(torch.autograd.Function):
    """Two tensors as one of a class of its own."""

    @staticmethod
    def forward(ctx: Any, one, two):
        return TwoTensor(one, two)

    @staticmethod
    def backward(ctx: Any, gradient):  # type: ignore[override]
        return gradient.a, gradient.b


class Unwrap(torch.autograd.Function):
    """The two tensors in one."""

    @staticmethod
    def forward(ctx: Any, tensor):
        return tensor.a.clone(), tensor.b.clone()

    @staticmethod
    def backward(ctx: Any, one, two):  # type: ignore[override]
        return TwoTensor(one, two)


@on_ranks(2)
def test_a_tensor_that_wraps_others_is_sent_as_these():
    schedule, _ = schedule_of(lambda x: Wrap.apply(x, 2 * x))
    text = "the stage returned a TwoTensor; return the plain tensors in it, and wrap them in the next stage"
    with pytest.raises(PipelineError, match=text):
        schedule.run(rows(2))
    rank, mended = dist.get_rank(), Scale(lambda x: Unwrap.apply(Wrap.apply(x, 2 * x)))

    def last(one, two):
        one, two = Unwrap.apply(2 * Wrap.apply(one, two))
        return (one * two).sum()

    stage = PipelineStage(last if rank else mended, rank, 2, device=device_type())
    losses = hp_pipeline.ScheduleGPipe(stage, 2).run(rows(2))
    assert [loss.item() for loss in losses] == ([8 * 9 * 1.0, 8 * 9 * 13.0] if rank else [])
    if rank == 0:
        assert torch.equal(mended.weight.grad, 16 * 3.0 * rows(2).square().sum(0) / 2)


@on_ranks(2)
def test_a_result_that_is_written_to_while_it_is_sent_is_refused_on_all_ranks():
    kept = torch.zeros(1, 2, device=device_type())
    schedule, module = schedule_of(lambda x: kept.copy_(x.detach()) if dist.get_rank() == 0 else x, dyn_shape=False)
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"forward: the stage wrote to a tensor that it had returned, while it"):
            schedule.run(rows(2))
    then = lambda x: kept.copy_(x.detach()).clone() if dist.get_rank() == 0 else x  # noqa: E731
    losses = schedule_of(then, dyn_shape=False)[0].run(rows(2))
    assert [loss.item() for loss in losses] == ([9.0, 45.0] if dist.get_rank() else [])


@on_ranks(2)
@pytest.mark.parametrize("wrong", ["first", "second"])
def test_after_a_run_with_messages_of_a_wrong_shape_the_next_one_works(wrong):
    failing = [True]

    def then(x):
        return torch.cat([x, x]) if failing and (x[0, 0] == 0) == (wrong == "first") else x

    schedule, module = schedule_of(then)
    with pytest.raises(PipelineError, match="Messages that differ need"):
        schedule.run(rows(2))
    failing.clear()
    for _ in range(2):
        module.zero_grad()
        losses = schedule.run(rows(2))
        assert [loss.item() for loss in losses] == ([9.0, 45.0] if dist.get_rank() else [])


@on_ranks(2)
def test_a_stage_that_is_frozen_between_runs_works_from_the_second_run_on():
    schedule, module = schedule_of(lambda x: x)
    schedule.run(rows(2))
    module.weight.requires_grad_(dist.get_rank() == 1)
    with pytest.raises(PipelineError, match="Messages that differ need"):
        schedule.run(rows(2))
    module.zero_grad()
    losses = schedule.run(rows(2))
    assert [loss.item() for loss in losses] == ([9.0, 45.0] if dist.get_rank() else [])
    assert (module.weight.grad is None) == (dist.get_rank() == 0)


@on_ranks(2)
def test_dims_that_are_none_are_refused_on_all_ranks():
    net = Net(2).double().to(device_type())
    x, target = batch(4, device_type())
    for dim in (-2, None):
        options: Any = {"kwargs_batch_dim": {"target": dim}} if dist.get_rank() else {}
        schedule = build("Schedule1F1B", 2, net, **options)
        with pytest.raises(ValueError, match=f"BatchDimSpec: batch_dim must be .* got {dim}"):
            schedule.run(x, target=target)


@on_ranks(3)
def test_forwards_alone_over_stages_of_several_ranks_go_on_after_a_failure():
    rank = dist.get_rank()
    mesh = DeviceMesh(device_type(), [0, 1] if rank < 2 else [2])
    failing = [True]

    def first(x):
        if rank == 1 and failing:
            raise ArithmeticError("too hot")
        return DTensor.from_local(x * 2, mesh, [Replicate()])

    work: Any = (lambda x: x.to_local()) if rank == 2 else first
    options: Any = {"device": device_type(), "mesh": mesh, "placements": [Replicate()], "has_backward": False}
    schedule = hp_pipeline.ScheduleGPipe(PipelineStage(work, rank // 2, 2, **options), 2, output_concat_dim=0)
    with pytest.raises(PipelineError, match="rank 1 at 0F0: ArithmeticError: too hot"):
        schedule.run(rows(4))
    failing.clear()
    for _ in range(2):
        output = schedule.run(rows(4))
        assert rank < 2 or torch.equal(output, rows(4) * 2)


@on_ranks(2)
def test_nothing_of_a_run_is_held_when_it_is_over():
    rank = dist.get_rank()
    alive: list[Any] = []
    failing: list[bool] = []

    def returned(x):
        alive.append(weakref.ref(x))
        if failing and rank:
            raise ArithmeticError("too hot")
        return x

    stage = PipelineStage(Scale(returned), rank, 2, has_backward=False)
    schedule = hp_pipeline.ScheduleGPipe(stage, 2)
    outputs = schedule.run(rows(4))
    del outputs
    assert [each() for each in alive] == [None, None]
    alive.clear()
    failing.append(True)
    try:
        schedule.run(rows(4))
    except PipelineError:
        pass
    else:
        raise AssertionError("no error")
    assert alive and [each() for each in alive] == [None] * len(alive)


@on_ranks(2)
@pytest.mark.parametrize("replaced", [0, 1])
def test_a_shared_weight_that_is_another_object_in_the_next_run(replaced):
    rank = dist.get_rank()
    info = SharedParameterInfo("weight", (0, 1))
    schedule, module = schedule_of(None, shared_parameters=[info])
    for turn in range(3):
        module.zero_grad()
        if turn == 1 and rank == replaced:
            module.load_state_dict({"weight": module.weight.detach().clone()}, assign=True)
            module.weight.requires_grad_()
        schedule.run(rows(4))
        # x w * w for two micro-batches of two rows
        expected = 2 * rows(4).sum(0) * 3.0 / 2
        assert torch.equal(module.weight.grad, expected), turn


@on_ranks(2)
def test_options_that_would_do_nothing_are_refused():
    net = Net(4).double().to(device_type())
    schedule = build("ScheduleZBV", 2, net)
    with pytest.raises(ValueError, match="FWD_SEND is a send or receive, which nothing may replace"):
        schedule.register_custom_function(MetaStepType.FWD_SEND, lambda step, run: run())
    order: Any = schedule.exec_order
    with pytest.raises(TypeError, match="does not support item assignment"):
        order[0] = ()


@on_ranks(4)
def test_pipelines_that_run_together_raise_together_and_go_on():
    groups, rank = get_platform().groups, dist.get_rank()
    failing: list[int] = [3]

    def then(x):
        if rank in failing:
            raise ArithmeticError("too hot")
        return x.sum() if rank % 2 else x

    stage = PipelineStage(Scale(then), rank % 2, 2)
    pair = groups.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
    schedule = hp_pipeline.ScheduleGPipe(stage, 2, group=pair, peers=groups.default_group())
    for _ in range(2):
        with pytest.raises(PipelineError, match="next run; rank 3 at 1F0: ArithmeticError: too hot.$"):
            schedule.run(rows(2))
    failing.clear()
    for turn, x in enumerate((rows(2), rows(3) if rank == 2 else rows(2), rows(2))):
        stage.submodule.zero_grad()
        refused = pytest.raises(ValueError, match="An input does not fit; ") if turn == 1 else contextlib.nullcontext()
        with refused:
            losses = schedule.run(x)
            assert [loss.item() for loss in losses] == ([9.0, 45.0] if rank % 2 else [])
    assert stage.submodule.weight.grad is not None
    with pytest.raises(ValueError, match=r"got a group of \[\d, \d\], without the ranks \[\d\] of this pipeline"):
        hp_pipeline.ScheduleGPipe(stage, 2, peers=pair, group=groups.new_group([rank % 2, rank % 2 + 2]))
    stage, crossed = PipelineStage(Scale(), rank // 2, 2), groups.new_group([rank % 2, rank % 2 + 2])
    stage.submodule.then = torch.sum if rank > 1 else stage.submodule.then
    losses = hp_pipeline.ScheduleGPipe(stage, 2, peers=groups.default_group(), group=crossed).run(rows(2))
    assert [loss.item() for loss in losses] == ([9.0, 45.0] if rank > 1 else [])
