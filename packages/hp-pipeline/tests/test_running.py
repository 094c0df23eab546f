"""Schedules that run, against one process in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_models import SHAPES, Net, Stage, batch, reference
from torch import nn

import hp_pipeline
from hp_pipeline import MetaStepType, PipelineError, PipelineSchedule, PipelineStage, lower, placed, schedules
from hp_testing import device_type, on_ranks

pytestmark = [pytest.mark.device, pytest.mark.framework("torch")]


def build(name, micro_batches, net, **options):
    """Make this rank's part of a schedule."""
    kind, shape = getattr(hp_pipeline, name), SHAPES[name]
    rank, ranks, stages = dist.get_rank(), dist.get_world_size(), len(net.parts)
    placement = placed(shape, ranks, stages // ranks if shape == "loop" else None)
    own = [PipelineStage(Stage(net, index), index, stages) for index, place in enumerate(placement) if place == rank]
    return kind(own, micro_batches, **options)


def train(name, micro_batches, stages, steps=2):
    """Train for some steps; return the stages' module and the losses."""
    rows = 2 * micro_batches
    net = Net(stages).double().to(device_type())
    schedule = build(name, micro_batches, net)
    own = nn.ModuleList(stage.submodule for stage in schedule.stages)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x, target = batch(rows, device_type())
        losses.append(schedule.run(x, target=target))
        optimizer.step()
    return own, losses


def compare(name, micro_batches, stages, exact=False):
    net, expected = reference(stages, 2 * micro_batches, micro_batches)
    own, losses = train(name, micro_batches, stages)
    names = {id(parameter): key for key, parameter in net.named_parameters()}
    whole = dict(net.named_parameters())
    assert len(names) == len(whole)
    for stage in own:
        for key, parameter in stage.named_parameters():
            close(parameter, whole[key], exact)
            close(parameter.grad, whole[key].grad, exact)
    last = [stage for stage in own if hasattr(stage, "head")]
    for got, wanted in zip(losses, expected, strict=True):
        assert len(got) == (micro_batches if last else 0)
        for one, other in zip(got, wanted, strict=bool(last)):
            close(one, other, exact)


def compare_step(schedule, losses, stages, rows, micro_batches):
    """Compare the losses and gradients of one run with those of one process."""
    net, (expected,) = reference(stages, rows, micro_batches, steps=1)
    whole = dict(net.named_parameters())
    for stage in schedule.stages:
        for key, parameter in stage.submodule.named_parameters():
            close(parameter.grad, whole[key].grad, False)
    for loss, wanted in zip(losses, expected if schedule.stages[-1].is_last_stage else [], strict=True):
        close(loss, wanted, False)


def close(tensor, expected, exact):
    tensor, expected = tensor.detach().cpu(), expected.detach()
    assert torch.equal(tensor, expected) if exact else torch.allclose(tensor, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.smoke
@on_ranks(1, 2, 4, thorough=(3,))
@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_equals_one_process(name, ranks):
    several = {1, 2, ranks, 2 * ranks + 1} if ranks < 3 else {1, ranks, 2 * ranks + 1}
    for micro_batches in sorted(several) if device_type() == "cpu" else [2 * ranks + 1]:
        compare(name, micro_batches, len(placed(SHAPES[name], ranks)), exact=device_type() == "cpu")


@on_ranks(2)
def test_forwards_alone():
    net = Net(2).double().to(device_type())
    rank = dist.get_rank()
    stage = PipelineStage(Stage(net, rank), rank, 2, has_backward=False)
    schedule = hp_pipeline.ScheduleGPipe(stage, 3, output_concat_dim=0)
    x, _ = batch(6, device_type())
    output = schedule.run(x)
    assert all(parameter.grad is None for parameter in net.parameters())
    if rank:
        whole = Net(2).double().to(device_type())
        assert torch.equal(output, torch.cat([whole(part.clone()) for part in x.chunk(3)]))
    else:
        assert output == []


@on_ranks(2)
@pytest.mark.parametrize("name", SHAPES)
def test_forwards_alone_in_the_order_of_any_schedule(name):
    placement = placed(SHAPES[name], 2)
    net = Net(len(placement)).double().to(device_type())
    own = [stage for stage, place in enumerate(placement) if place == dist.get_rank()]
    stages = [PipelineStage(Stage(net, index), index, len(placement), has_backward=False) for index in own]
    schedule = getattr(hp_pipeline, name)(stages, 5, output_concat_dim=0)
    x, _ = batch(10, device_type())
    output = schedule.run(x)
    if own[-1] == len(placement) - 1:
        with torch.no_grad():
            assert torch.equal(output, torch.cat([net(part) for part in x.chunk(5)]))
    assert all(parameter.grad is None for parameter in net.parameters())


class Sums(nn.Module):
    """Adds what is in a nest, in the last stage with what the first passed on."""

    def forward(self, x=0.0, more=None):
        nested = more["a"] * more["factor"] + more["b"][0]
        return x + nested if dist.get_rank() == 0 else (x * nested).sum()


@on_ranks(2)
def test_nests_of_inputs_are_cut():
    rank = dist.get_rank()
    schedule = hp_pipeline.ScheduleGPipe(PipelineStage(Sums(), rank, 2), 2)
    x = torch.arange(8.0, device=device_type()).view(4, 2)
    more = {"a": x + 1, "b": (x + 2, torch.tensor(1.0)), "factor": 3}
    with torch.enable_grad():
        losses = schedule.run(x.clone().requires_grad_(), more=more) if rank == 0 else schedule.run(more=more)
    nested = more["a"] * 3 + more["b"][0]
    expected = [part.sum().item() for part in ((x + nested) * nested).chunk(2)]
    assert [loss.item() for loss in losses] == (expected if rank else [])
    for wrong, text in (
        ({**more, "a": x[:3]}, r"input 'more', in its leaf 0, has 3 rows along dim 0, which 2 micro-batches do not"),
        (Held(x), r"input 'more' is a Held that holds tensors, which are not cut into micro-batches"),
    ):
        with pytest.raises(ValueError, match=text):
            schedule.run(x, more=wrong) if rank == 0 else schedule.run(more=wrong)
    work = Sums()
    work.forward = lambda x, more: Sums.forward(work, x, {"a": more.tensor, "b": (x, x), "factor": 3})
    whole = hp_pipeline.ScheduleGPipe(PipelineStage(work, rank, 2), 2, kwargs_batch_dim={"more": -1})
    whole.run(x, more=Held(x[:2])) if rank == 0 else whole.run(more=Held(x[:2]))


@on_ranks(2)
def test_a_dim_that_an_input_lacks_is_named():
    rank, x = dist.get_rank(), torch.arange(4.0, device=device_type())
    scale = torch.ones((), device=device_type(), requires_grad=True)
    stage = PipelineStage((lambda x: x.sum()) if rank else lambda x: x * scale, rank, 2, device=device_type())
    with pytest.raises(ValueError, match=r"has shape \(4,\) and no dim 1 to cut; name its dim, or -1 to"):
        hp_pipeline.ScheduleGPipe(stage, 2, args_batch_dim=[1]).run(x)
    for dim, expected in ((0, [1.0, 5.0]), (-1, [6.0, 6.0])):
        losses = hp_pipeline.ScheduleGPipe(stage, 2, args_batch_dim=[dim]).run(x)
        assert [loss.item() for loss in losses] == (expected if rank else [])


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


class Nested(nn.Module):
    """Passes on a nest: a tensor with a gradient, one without, integers, plain values, one that nobody uses."""

    def __init__(self, last):
        super().__init__()
        self.weight, self.unused, self.last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), last

    def forward(self, x, more=None, bonus=1.0):
        if more is not None:
            assert more["name"] == "first" and more["count"].dtype is torch.int64
            assert not more["plain"].requires_grad and more["unused"].requires_grad
            x = x + more["plain"]
        x = x * self.weight
        if self.last:
            return (x * bonus).sum()
        more = {
            "name": "first",
            "count": torch.arange(2, device=x.device),
            "plain": x.detach() * 2,
            "unused": x * self.unused,
        }
        return x, more


@on_ranks(2)
def test_nests_and_tensors_without_gradients():
    rank, x = dist.get_rank(), torch.arange(6.0, device=device_type()).view(2, 3)
    stage = PipelineStage(Nested(rank == 1).to(device_type()), rank, 2)
    schedule = hp_pipeline.Schedule1F1B(stage, 2, kwargs_batch_dim={"bonus": -1} if rank else None)
    losses = schedule.run(x, **({"bonus": torch.tensor(2.0)} if rank else {}))
    if rank:
        assert [loss.item() for loss in losses] == [2 * 3 * row.sum().item() for row in x]
        assert torch.equal(stage.submodule.weight.grad, 3 * x.sum(0))
    else:
        assert torch.equal(stage.submodule.weight.grad, x.sum(0))
        assert stage.submodule.unused.grad is None


@on_ranks(2)
def test_shapes_that_change():
    rank = dist.get_rank()

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            if rank:
                return (x * self.weight).sum()
            return (x * self.weight)[:, : int(x[0, 0])]

    x = torch.tensor([[1.0, 5.0, 7.0], [3.0, 5.0, 7.0]], device=device_type())
    fixed = hp_pipeline.ScheduleGPipe(PipelineStage(Growing().to(device_type()), rank, 2), 2)
    text = (
        r"rank 0 at 0F1: ValueError: stage 0 -> stage 1, forward: the stage returned \(torch.float32 of shape \(1, 3\)"
        r" with a gradient\), and \(torch.float32 of shape \(1, 1\) .*dyn_shape=True"
    )
    with pytest.raises(PipelineError, match=text):
        fixed.run(x)
    stage = PipelineStage(Growing().to(device_type()), rank, 2, dyn_shape=True)
    losses = hp_pipeline.ScheduleGPipe(stage, 2).run(x)
    assert [loss.item() for loss in losses] == ([1.0, 15.0] if rank else [])
    assert stage.submodule.weight.grad.item() == 8.0


@on_ranks(3)
@pytest.mark.parametrize("place", ["0F0", "1F1", "2F1", "1B0"])
def test_a_stage_that_raises_is_named_on_all_ranks_and_the_next_run_works(place):
    stages, micro_batches = 3, 4
    net = Net(stages).double().to(device_type())
    schedule = build("Schedule1F1B", micro_batches, net)
    failing = [True]

    def custom(step, run):
        if failing and str(step) == place:
            raise ArithmeticError("too hot")
        run()

    x, target = batch(2 * micro_batches, device_type())
    for warm in (False, True):
        for kind in (MetaStepType.FORWARD, MetaStepType.BACKWARD):
            schedule.register_custom_function(kind, custom)
        if warm:
            failing.clear()
            schedule.run(x, target=target)
            failing.append(True)
        with pytest.raises(PipelineError, match=f"rank {place[0]} at {place}: ArithmeticError: too hot"):
            schedule.run(x, target=target)
        failing.clear()
        net.zero_grad()
        compare_step(schedule, schedule.run(x, target=target), stages, 2 * micro_batches, micro_batches)
        failing.append(True)


@on_ranks(2)
def test_bad_input_is_refused_on_all_ranks_before_anything_is_sent():
    rank = dist.get_rank()
    net = Net(2).double().to(device_type())
    x, target = batch(6, device_type())
    schedule = build("Schedule1F1B", 4, net)
    with pytest.raises(ValueError, match="has 6 rows along dim 0, which 4 micro-batches do not divide"):
        schedule.run(x, target=target)
    assert len(build("Schedule1F1B", 3, net).run(x, target=target)) == 3 * rank
    schedule = build("Schedule1F1B", 3 if rank else 2, net)
    with pytest.raises(ValueError, match=r"The ranks \[1\] of the pipeline have another order than rank 0"):
        schedule.run(x, target=target)
    schedule = build("Schedule1F1B", 2, net)
    with pytest.raises(PipelineError, match=r"rank 1 at 1F0: TypeError: the last stage must return a scalar loss, .*"
                       r"a tensor of shape \(3, 5\)"):  # fmt: skip
        schedule.run(x)
    losses, own = schedule.run(x, target=target), schedule.stages[0].submodule
    stage = PipelineStage(
        (lambda *args, **kwargs: SimpleNamespace(loss=own(*args, **kwargs))) if rank else own, rank, 2
    )
    assert (
        list(map(torch.equal, losses, hp_pipeline.Schedule1F1B(stage, 2).run(x, target=target))) == [True, True] * rank
    )


@on_ranks(2)
def test_a_loss_without_a_graph_is_refused():
    rank, net = dist.get_rank(), Net(2).double().to(device_type())
    x, target = batch(4, device_type())
    last = Stage(net, 1)
    own = PipelineStage((lambda *args, **kwargs: last(*args, **kwargs).detach()) if rank else Stage(net, 0), rank, 2)
    with pytest.raises(
        PipelineError, match="rank 1 at 1F0: ValueError: the loss of the last stage needs no gradient, but"
    ):
        hp_pipeline.Schedule1F1B(own, 2).run(x, target=target)
    alone = PipelineStage(own.submodule, rank, 2, has_backward=False)
    assert len(hp_pipeline.Schedule1F1B(alone, 2).run(x, target=target)) == 2 * rank


@on_ranks(2)
def test_a_batch_that_one_rank_cannot_prepare_is_refused_on_all_ranks():
    rank, net = dist.get_rank(), Net(2).double().to(device_type())
    x, target = batch(4, device_type())
    schedule = build("Schedule1F1B", 2, net)
    schedule.stages[0].submodule.prepare_batch = lambda kwargs, count: kwargs["labels"]
    for _ in range(2):  # on both ranks, then on one
        with pytest.raises(ValueError, match=r"^An input does not fit; KeyError: 'labels'\.$"):
            schedule.run(x, target=target)
        if rank == 0:
            vars(schedule.stages[0].submodule).pop("prepare_batch", None)


@on_ranks(2)
def test_stages_that_are_not_this_ranks_are_refused():
    net, rank = Net(2).to(device_type()), dist.get_rank()
    with pytest.raises(ValueError, match=rf"Schedule1F1B: rank {rank} of 2 runs the stages \({rank},\) of 2, got"):
        hp_pipeline.Schedule1F1B(PipelineStage(Stage(net, 1 - rank), 1 - rank, 2), 2)
    with pytest.raises(
        ValueError, match=r"on 2 ranks has 4 stages, stage_num is 2; placed\('v', 2\) lists their ranks"
    ):
        hp_pipeline.ScheduleZBV(PipelineStage(Stage(net, rank), rank, 2), 2)
    four, own = Net(4).to(device_type()), [index for index, each in enumerate(placed("v", 2)) if each == rank]
    hp_pipeline.ScheduleZBV([PipelineStage(Stage(four, index), index, 4) for index in own], 2)
    with pytest.raises(ValueError, match="stage_index=2 is not one of stage_num=2 from 0"):
        PipelineStage(net, 2, 2)
    with pytest.raises(TypeError, match="PipelineStage: module must be callable, got int"):
        PipelineStage(3, 0, 2)


@on_ranks(2)
def test_an_order_of_ones_own():
    net = Net(2).double().to(device_type())
    schedule = build("Schedule1F1B", 2, net)
    with pytest.raises(ValueError, match="steps that are missing: 0F0"):
        schedule.exec_order = {0: (), 1: schedule.exec_order[1]}
    with pytest.raises(ValueError, match="exec_order moves saved tensors to the host; pass swap=True"):
        schedule.exec_order = lower(schedule.exec_order, schedule.pipeline, swapped=[0, 1])
    moving = build("Schedule1F1B", 2, net, swap=True)
    moving.exec_order = lower(schedules.gpipe(schedule.pipeline), schedule.pipeline, swapped=[0, 1])
    schedule.exec_order = schedules.gpipe(schedule.pipeline)
    x, target = batch(4, device_type())
    losses = schedule.run(x, target=target)
    assert list(map(torch.equal, losses, moving.run(x, target=target))) == [True, True] * dist.get_rank()
    for order in (schedules.gpipe, schedules.gpipe(schedule.pipeline)):
        own = PipelineSchedule(schedule.stages, 2, order=order)
        assert own.exec_order == schedule.exec_order
    with pytest.raises(ValueError, match="PipelineSchedule has no order of its own: pass order=, or take a class such"):
        PipelineSchedule(schedule.stages, 2)


@on_ranks(2)
def test_a_rank_with_stages_with_and_without_backward_is_refused():
    net, rank = Net(4).to(device_type()), dist.get_rank()
    own = [PipelineStage(Stage(net, index), index, 4, has_backward=index > 1) for index in (rank, 3 - rank)]
    with pytest.raises(ValueError, match=f"rank {rank} has stages with has_backward=True and False; a pipeline runs"):
        hp_pipeline.ScheduleZBV(own, 2)
    own[0].submodule.requires_grad_(False)
    schedule = hp_pipeline.ScheduleZBV([PipelineStage(each.submodule, each.stage_index, 4) for each in own], 2)
    x, target = batch(4, device_type())
    schedule.run(x.float(), target=target)
    assert own[0].submodule.parts[str(rank)][0].up.weight.grad is None and own[1].submodule.parts is not None


@on_ranks(2)
def test_gradients_are_taken():
    net = Net(2).double().to(device_type())
    schedule = build("Schedule1F1B", 2, net)
    x, target = batch(4, device_type())
    schedule.run(x, target=target)
    parameters = list(net.parameters())
    gradients = [parameter.grad for parameter in parameters]
    taken = schedule.take_gradients(parameters)
    assert all(one is other for one, other in zip(taken, gradients, strict=True)) and {*map(type, taken)} > {type(None)}
    assert schedule.take_gradients(parameters) == (None,) * len(parameters)


@on_ranks(4)
def test_chains_that_join():
    # Stages 0 -> 1 -> 3 and 2 -> 3: an encoder beside the first part of a language model.
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers: Any = [nn.Linear(3, 3, dtype=torch.float64).to(device_type()) for _ in range(4)]
    x = torch.randn(4, 3, dtype=torch.float64).to(device_type())

    def last(a, b):
        return layers[3](torch.tanh(a) * b).pow(2).sum()

    work = [layers[0], layers[1], layers[2], last][rank]
    schedule = PipelineSchedule(
        PipelineStage(work, rank, 4, device=x.device),
        2,
        order=schedules.gpipe,
        boundaries=[(0, 1), (1, 3), (2, 3)],
    )
    schedule.run(x)
    gradient = layers[rank].weight.grad.clone()
    for layer in layers:
        layer.zero_grad()
    for part in x.chunk(2):
        (last(layers[1](layers[0](part)), layers[2](part)) / 2).backward()
    assert torch.allclose(gradient, layers[rank].weight.grad, rtol=1e-12)


@on_ranks(2)
def test_gradients_of_several_stages_add_up_as_on_one_device():
    # Stage 0 passes on to three others, on both ranks: what they send back comes in another order than it was used in.
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers: Any = [nn.Linear(16, 16).to(device_type()) for _ in range(4)]
    x = torch.randn(8, 16).to(device_type())

    def second(a):
        return torch.tanh(layers[1](a))

    def third(a, b):
        return torch.sin(layers[2](a * b))

    def last(a, c):
        return (layers[3](a) + c).exp().sum()

    for placement in ((0, 1, 0, 1), (0, 0, 1, 0), (0, 1, 1, 0)):
        work = [layers[0], second, third, last]
        own = [PipelineStage(work[each], each, 4, device=x.device) for each in range(4) if placement[each] == rank]
        boundaries = [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)]
        schedule = PipelineSchedule(own, 2, order=schedules.gpipe, boundaries=boundaries, placement=placement)
        schedule.run(x)
        gradient = layers[0].weight.grad
        layers[0].weight.grad = None
        for part in x.chunk(2):
            first = layers[0](part)
            (last(first, third(first, second(first))) / 2).backward()
        assert rank or torch.equal(gradient, layers[0].weight.grad)
        for layer in layers:
            layer.zero_grad()


@on_ranks(2)
def test_a_stage_does_not_write_to_what_is_being_sent():
    rank, seen = dist.get_rank(), []
    layers: Any = [nn.Linear(4, 4).to(device_type()) for _ in range(3)]

    def first(x):
        seen.append(layers[0](x))
        return seen[-1]

    def last(a, b):  # on the rank of the first stage, whose output goes to the other rank as well
        seen.append(a)
        return (a.mul_(2) + b).sum()

    work = [first, lambda a: torch.tanh(layers[1](a)), last]
    placement = (0, 1, 0)
    own = [PipelineStage(work[each], each, 3, device=device_type()) for each in range(3) if placement[each] == rank]
    schedule = PipelineSchedule(own, 1, order=schedules.gpipe, boundaries=[(0, 1), (0, 2), (1, 2)], placement=placement)
    torch.manual_seed(0)
    x = torch.randn(3, 4).to(device_type())
    schedule.run(x)
    assert rank or (seen[0].data_ptr() != seen[1].data_ptr() and torch.equal(seen[1], seen[0] * 2))
