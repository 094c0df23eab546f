"""What goes between stages: windows, communicators, memory, and what messages are made of; against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_models import Net, batch
from test_running import build, close, compare, compare_step
from torch import nn

import hp_pipeline
from hp_pipeline import MetaStepType, PipelineStage
from hp_pipeline.messages import channels
from hp_platform import get_platform
from hp_platform.torch import collectives
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


@on_ranks(3)
@pytest.mark.parametrize("window", [0, 1, 5])
def test_receives_ahead_change_no_bit(window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "WINDOW", window)
        for name, chunks in (("Schedule1F1B", 1), ("ScheduleZBV", 2)):
            compare(name, 4, 3 * chunks, exact=device_type() == "cpu")


@on_ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_p2p_receives_ahead_or_in_place(overlap):
    schedule = build("Schedule1F1B", 4, Net(2).double().to(device_type()), overlap_p2p=overlap)
    ahead = []

    def count(step, run):
        run()
        ahead.append(max(len(channel._posted) for channel in schedule._runner.channels.values()))

    x, target = batch(8, device_type())
    schedule.run(x, target=target)
    schedule.register_custom_function(MetaStepType.FORWARD, count)
    schedule.run(x, target=target)
    schedule.run(x, target=target)  # what messages look like is known now
    can = get_platform().collectives.receives_ahead(dist.group.WORLD, x.device)
    assert max(ahead) == (2 if overlap and can else 0)


@on_ranks(3)
def test_a_communicator_for_each_channel():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "_groups", {})
        patch.setattr(collectives, "has_tags", lambda group, device: False)
        greet = channels._greet
        patch.setattr(channels, "_greet", lambda *args: (seen.append(args[0]), greet(*args)))
        for name, chunks in (("ScheduleGPipe", 1), ("ScheduleInterleaved1F1B", 2), ("ScheduleZBV", 2)):
            compare(name, 4, 3 * chunks, exact=device_type() == "cpu")
    rank = dist.get_rank()
    # GPipe asks for two with each neighbour; a loop of two chunks for two more, and two between its ends; V for none.
    assert len(seen) == len(set(seen)) == {0: 6, 1: 8, 2: 6}[rank]
    for pair in seen:
        assert get_platform().groups.size(pair) == 2


@on_ranks(2)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZB1P"])
def test_what_was_taken_is_let_go_before_the_run_ends(name):
    schedule = build(name, 12, Net(2).double().to(device_type()))
    alive = []

    def count(step, run):
        run()
        alive.append(sum(len(channel._sent) for channel in schedule._runner.channels.values()))

    schedule.register_custom_function(MetaStepType.FORWARD, count)
    x, target = batch(12, device_type())
    schedule.run(x, target=target)
    assert len(alive) == 12 and max(alive) <= 2, f"messages that were kept at each forward: {alive}"


@on_ranks(2)
def test_the_next_batch_may_have_another_size():
    net = Net(2).double().to(device_type())
    schedule = build("Schedule1F1B", 2, net)
    for rows in (4, 8, 2, 8):
        net.zero_grad()
        x, target = batch(rows, device_type())
        compare_step(schedule, schedule.run(x, target=target), 2, rows, 2)


class Sender(nn.Module):
    """The first stage of two, which returns what a function makes of a linear map."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4, dtype=torch.float64), make

    def forward(self, x):
        return self.make(self.layer(x))


class WideGradient(torch.autograd.Function):
    """The sum in float32 of a bfloat16 tensor, whose gradient is left in float32."""

    @staticmethod
    def forward(ctx: Any, x):
        ctx.shape = x.shape
        return x.float().sum()

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        return grad.float().expand(ctx.shape) / 3


def in_place(x):
    x.mul_(3).add_(1)[0] = 2
    return (x * x).sum()


BOUNDARIES: dict[str, tuple[Any, Any]] = {
    "transposed": (lambda y: y.t(), lambda x: (x @ x.t()).sum()),
    "strided": (lambda y: y[:, ::2], lambda x: x.square().sum()),
    "expanded": (lambda y: y.sum(0).expand(3, 4), lambda x: x.tanh().sum()),
    "bfloat16": (lambda y: y.bfloat16(), WideGradient.apply),
    "in-place": (lambda y: y * 1, in_place),
    "no gradient": (lambda y: y.detach(), lambda x: x.sum()),
    "one of chunk": (lambda y: (y.chunk(2)[1], y.argmax(), None), lambda x, place, nothing: (x * place).sum()),
    "empty": (lambda y: y[:0], lambda x: x.sum()),
}


@on_ranks(2)
@pytest.mark.parametrize("name", BOUNDARIES)
def test_what_is_sent_arrives_as_in_one_process(name):
    send, take = BOUNDARIES[name]
    torch.manual_seed(7)
    first: Any = Sender(send).to(device_type())
    rank = dist.get_rank()
    x = torch.randn(12, 4, dtype=torch.float64).to(device_type())
    scale: Any = torch.ones((), dtype=torch.float64, device=device_type(), requires_grad=True)

    def last(*args):
        return take(*args) * scale

    stage = PipelineStage(last if rank else first, rank, 2, device=x.device)
    losses = hp_pipeline.Schedule1F1B(stage, 3).run(x)
    gradient = scale.grad if rank else first.layer.weight.grad
    scale.grad = None
    first.zero_grad()
    wanted = []
    for part in x.chunk(3):
        made = first(part)
        wanted.append(last(*(made if isinstance(made, tuple) else (made,))))
        (wanted[-1] / 3).backward()
    expected: Any = scale.grad if rank else first.layer.weight.grad
    assert (gradient is None) == (expected is None)
    # What was transposed arrives contiguous, which may change the last bit of a matrix product.
    assert gradient is None or torch.allclose(gradient, expected, rtol=1e-12, atol=0)
    assert all(
        torch.allclose(loss, each, rtol=1e-12, atol=0)
        for loss, each in zip(losses, wanted if rank else [], strict=True)
    )


@on_ranks(2)
def test_another_schedule_of_the_same_ranks_and_collectives_between():
    net = Net(2).double().to(device_type())
    rank = dist.get_rank()
    training = build("Schedule1F1B", 3, net)
    test = PipelineStage(training.stages[0].submodule, rank, 2, has_backward=False)
    testing = hp_pipeline.ScheduleGPipe(test, 2, output_concat_dim=0)
    sums: list[Any] = []
    # Where an operation holds up the host, a collective here would wait for a rank that waits for this one.
    beside = get_platform().collectives.receives_ahead(dist.group.WORLD, device_type())

    def reduce(step, run):
        run()
        if not beside:
            return
        tensor = torch.full((), float(step.micro_index), device=device_type())
        sums.append((tensor, dist.all_reduce(tensor, async_op=True)))

    training.register_custom_function(MetaStepType.BACKWARD, reduce)
    x, target = batch(6, device_type())
    for _ in range(2):
        net.zero_grad()
        losses = training.run(x, target=target)
        for _, work in sums:
            work.wait()
        assert [tensor.item() for tensor, _ in sums] == ([0.0, 2.0, 4.0] if beside else [])
        sums.clear()
        outputs = testing.run(x)
        compare_step(training, losses, 2, 6, 3)
        if rank:
            close(outputs, Net(2).double()(x.cpu().clone()), False)
