"""What ``check`` and ``simulate`` say of an order, beside what a run of it does."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist
from pipeline_models import SHAPES, Net, Stage, batch, reference
from test_running import close
from torch import nn

import hp_pipeline
from hp_pipeline import Costs, Pipeline, PipelineSchedule, PipelineStage, check, placed, schedules
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


class Saved(torch.autograd.Function):
    """Saves one token for backward."""

    @staticmethod
    def forward(ctx, x, tokens):
        ctx.token = Token(tokens)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Token:
    """Counts how many of its kind are alive, now and at most."""

    def __init__(self, counts):
        self.counts = counts
        counts[0] += 1
        counts[1] = max(counts)

    def __del__(self):
        self.counts[0] -= 1


class Counting(nn.Module):
    def __init__(self, tokens, last):
        super().__init__()
        self.linear, self.tokens, self.last = nn.Linear(3, 3), tokens, last

    def forward(self, x):
        x = Saved.apply(self.linear(x), self.tokens)
        return x.sum() if self.last else x


@on_ranks(3)
@pytest.mark.parametrize("name", SHAPES)
def test_a_run_holds_what_check_counts(name):
    kind, rank = getattr(hp_pipeline, name), dist.get_rank()
    placement, tokens = placed(SHAPES[name], 3), [0, 0]
    count = len(placement)
    own = [stage for stage, place in enumerate(placement) if place == rank]
    stages = [
        PipelineStage(Counting(tokens, stage == count - 1).to(device_type()), stage, count, device_type())
        for stage in own
    ]
    schedule = kind(stages, 7)
    for _ in range(2):
        tokens[1] = 0
        schedule.run(torch.randn(7, 3, device=device_type()))
        # The first half of a backward frees the graph, and with it the token.
        assert tokens == [0, check(schedule.exec_order, Pipeline(placement, 7, cost=Costs(held=0.0)))[rank]]


@on_ranks(2)
def test_mutated_orders_that_check_passes_compute_what_one_process_does():
    chance, rank = random.Random(2), dist.get_rank()
    whole, expected = reference(4, 6, 3, steps=1)
    weights, ran = dict(whole.named_parameters()), 0
    pipeline = Pipeline(placed("loop", 2), 3)
    formulas = [schedules.interleaved, schedules.interleaved_zb, schedules.gpipe]
    for number in range(60):
        order = {place: list(steps) for place, steps in formulas[number % 3](pipeline).items()}
        mutated = order[chance.randrange(2)]
        for _ in range(2):
            mutated.insert(chance.randrange(len(mutated)), mutated.pop(chance.randrange(len(mutated))))
        try:
            check({place: tuple(steps) for place, steps in order.items()}, pipeline)
        except ValueError:
            continue
        ran += 1
        net = Net(4).double().to(device_type())
        stages = [PipelineStage(Stage(net, index), index, 4) for index in (rank, rank + 2)]
        x, target = batch(6, device_type())
        losses = PipelineSchedule.from_steps(order, stages).run(x, target=target)
        for loss, wanted in zip(losses, expected[0], strict=bool(losses)):
            close(loss, wanted, exact=False)
        for stage in stages:
            for key, parameter in stage.submodule.named_parameters():
                close(parameter.grad, weights[key].grad, exact=False)
    assert ran > 5


@on_ranks(2)
def test_what_arrived_is_let_go_without_the_garbage_collector():
    rank, arrived = dist.get_rank(), []
    linear = nn.Linear(3, 3).to(device_type())

    def run(x):
        arrived.append(weakref.ref(x))
        x = linear(x)
        return x.sum() if rank else x

    schedule = hp_pipeline.Schedule1F1B(PipelineStage(run, rank, 2, device_type()), 3)
    gc.disable()
    try:
        schedule.run(torch.randn(3, 3, device=device_type()))
        assert len(arrived) == 3 and not any(each() is not None for each in arrived)
    finally:
        gc.enable()
