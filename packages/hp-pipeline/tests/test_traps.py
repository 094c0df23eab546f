"""What has gone wrong in pipelines: each module in two stages, bit by bit against one process."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hp_pipeline
from hp_offload import checkpoint_wrapper
from hp_pipeline import PipelineStage
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

WIDTH, MICRO_BATCHES = 6, 3


class Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *x):
        return self.inner(*x).float().pow(2).mean()


class Twice(nn.Module):
    """A weight used twice, and under a second name: the parent's and a child's."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(torch.tanh(self.one(x))))) @ self.weight


class Frozen(nn.Module):
    def __init__(self, trains=False):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(trains)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Chunked(nn.Module):
    """A node of several outputs, one of which nobody uses."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b, _ = self.layer(x).chunk(3, -1)
        return a * b, self.unused(x)


class TakesOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, _):
        return self.layer(a)


class Half(nn.Module):
    """Passes on bfloat16; its weights and their gradients are float32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x).bfloat16()


class FromHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x.float())


class Doubled(nn.Module):
    """Returns a tensor twice, or with a view of it."""

    def __init__(self, view=False):
        super().__init__()
        self.layer, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, x):
        hidden = self.layer(x)
        return hidden, hidden[:, :2] if self.view else hidden


class Writes(nn.Module):
    """Writes to the first of its inputs."""

    def __init__(self, writes=True):
        super().__init__()
        self.layer, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, a, b):
        if self.writes:
            a.mul_(2.0)
        return self.layer(a) + b.sum(-1, keepdim=True)


class Noisy(nn.Module):
    """Blocks with dropout that are computed again, with counted forwards."""

    def __init__(self, how):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(2)
        )
        self.how, self.forwards = how, 0
        for block in self.blocks:
            block[0].register_forward_pre_hook(self.count)
        if how == "wrapper":
            for place in range(2):
                self.blocks[place] = checkpoint_wrapper(self.blocks[place])

    def count(self, *_):
        self.forwards += 1

    def forward(self, x):
        for block in self.blocks:
            if self.how == "wrapper":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, **CONTEXTS[self.how])
        return x


def keep_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = {
    "all": {},
    "selective": {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_products)},
}


CASES = {
    "twice": lambda: (Twice(), Twice()),
    "frozen first": lambda: (Frozen(), Frozen(trains=True)),
    "frozen last": lambda: (Frozen(trains=True), Frozen()),
    "all frozen": lambda: (Frozen(), Frozen()),
    "chunk": lambda: (Chunked(), TakesOne()),
    "a tensor twice": lambda: (Doubled(), Writes()),
    "a tensor and a view of it": lambda: (Doubled(view=True), Writes(writes=False)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), nn.BatchNorm1d(WIDTH)),
    "bfloat16": lambda: (Half(), FromHalf()),
    "computed again": lambda: (Noisy("all"), Twice()),
    "computed again in part": lambda: (Noisy("selective"), Twice()),
    "checkpoint_wrapper": lambda: (Noisy("wrapper"), Twice()),
}


def whole(first, last, x):
    """Run one process, and return what hooks have seen."""
    seen = watched(nn.ModuleList([first, last]))
    for part in x.chunk(MICRO_BATCHES):
        result = first(part)
        loss = last(*result) if isinstance(result, tuple) else last(result)
        if loss.requires_grad:
            (loss / MICRO_BATCHES).backward()
    return seen


def watched(module):
    """Count the gradients that each parameter gets."""
    seen = {name: 0 for name, _ in module.named_parameters()}

    def count(name, _):
        seen[name] += 1

    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(functools.partial(count, name))
    return seen


@on_ranks(2)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZB1P"])
@pytest.mark.parametrize("case", list(CASES))
def test_bits_and_hooks_are_those_of_one_process(case, name):
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, last = CASES[case]()
    modules = nn.ModuleList([first, Loss(last)]).to(device_type())
    reference = copy.deepcopy(modules)
    if case == "twice":  # a copy of shared parameters is one of shared parameters
        assert reference[0].two.weight is reference[0].weight
    for module in reference:
        if isinstance(module, Noisy):  # the copies of these hooks count for the original
            for block in module.blocks:
                block[0]._forward_pre_hooks.clear()
    x = torch.randn(4 * MICRO_BATCHES, WIDTH).to(device_type())
    torch.manual_seed(1)
    expected = whole(*reference, x)
    seen = watched(modules[rank])
    schedule = getattr(hp_pipeline, name)(PipelineStage(modules[rank], rank, 2), MICRO_BATCHES)
    torch.manual_seed(1)
    schedule.run(x)
    own, other = modules[rank], reference[rank]
    for (key, one), two in zip(own.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), key
        if one.grad is not None and name == "ScheduleZB1P" and isinstance(last if rank else first, Twice):
            torch.testing.assert_close(one.grad, two.grad)  # the two halves add what one backward adds at once
        elif one.grad is not None:
            assert one.grad.dtype == two.grad.dtype and torch.equal(one.grad, two.grad), key
    assert all(map(torch.equal, own.buffers(), other.buffers()))
    hooked = {key.partition(".")[2]: count for key, count in expected.items() if key.startswith(f"{rank}.")}
    if name == "Schedule1F1B":
        assert seen == hooked
    else:  # of a weight that is used by heavy operations and by others both halves bring a gradient
        assert {key for key, count in seen.items() if count} == {key for key, count in hooked.items() if count}
    if not rank and isinstance(first, Noisy):
        assert first.forwards == 2 * 2 * MICRO_BATCHES, "each block forward, and once again"


@on_ranks(2)
@pytest.mark.parametrize("view", [False, True])
def test_inputs_that_are_one_tensor_on_one_rank(view):
    """The two stages in the middle of a V are on one rank."""
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH), Doubled(view), Writes(), Loss(nn.Linear(WIDTH, WIDTH))]
    modules = nn.ModuleList(stages).to(device_type())
    reference, rank = copy.deepcopy(modules), dist.get_rank()
    x = torch.randn(4 * MICRO_BATCHES, WIDTH).to(device_type())
    own = [rank, 3 - rank]
    schedule = hp_pipeline.ScheduleZBV([PipelineStage(modules[index], index, 4) for index in own], MICRO_BATCHES)
    if view:
        with pytest.raises(hp_pipeline.PipelineError, match="stage 2 wrote in place to an input that has memory in"):
            schedule.run(x)
        return
    for part in x.chunk(MICRO_BATCHES):
        (reference[3](reference[2](*reference[1](reference[0](part)))) / MICRO_BATCHES).backward()
    schedule.run(x)
    for index in own:
        for one, two in zip(modules[index].parameters(), reference[index].parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)


@on_ranks(2)
def test_a_write_to_a_view_that_came_is_refused():
    modules, rank = nn.ModuleList([Doubled(view=True), Loss(Writes())]).to(device_type()), dist.get_rank()
    schedule = hp_pipeline.Schedule1F1B(PipelineStage(modules[rank], rank, 2), MICRO_BATCHES)
    with pytest.raises(hp_pipeline.PipelineError, match=r"stage 1 wrote in place .* one tensor in stage 0 have"):
        schedule.run(torch.randn(4 * MICRO_BATCHES, WIDTH).to(device_type()))
    modules[1].inner.forward = lambda a, b: Writes.forward(modules[1].inner, a.clone(), b)
    reference, x = copy.deepcopy(modules), torch.randn(4 * MICRO_BATCHES, WIDTH).to(device_type())
    reference[1].inner.forward = lambda a, b: Writes.forward(reference[1].inner, a.clone(), b)
    modules.zero_grad()
    schedule.run(x)
    whole(*reference, x)
    for one, two in zip(modules[rank].parameters(), reference[rank].parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
