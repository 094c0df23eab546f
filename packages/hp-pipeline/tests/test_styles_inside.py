"""Tensor and context parallelism inside stages, by hp-styles, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hp_pipeline
from hp_dtensor import init_device_mesh
from hp_pipeline import MetaStepType, PipelineStage, placed
from hp_platform import collectives
from hp_styles import (
    ColwiseParallel,
    ContextParallel,
    RowwiseParallel,
    context_parallel_shard,
    parallelize_module,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

WIDTH, SIZE, ROWS, LENGTH, CLASSES = 8, 4, 4, 8, 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH, dtype=torch.float64), Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Part(nn.Module):
    def __init__(self, index, stages):
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Embedding(CLASSES, WIDTH, dtype=torch.float64) if index == 0 else nn.Identity()
        self.layer = Layer()
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64) if index == stages - 1 else None

    def forward(self, x, target=None):
        x = self.layer(self.first(x))
        return x if self.head is None else F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


TENSOR = {
    "layer.attention.[qkv]": ColwiseParallel(),
    "layer.attention.o": RowwiseParallel(),
    "layer.up": ColwiseParallel(),
    "layer.down": RowwiseParallel(),
}


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CLASSES, (2, ROWS, LENGTH), generator=generator).to(device_type())


def trained(stages):
    """Return the weights and gradients of one process after two steps."""
    parts = nn.ModuleList(Part(index, stages) for index in range(stages)).to(device_type())
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        x, target = data()
        for part in parts[:-1]:
            x = part(x)
        parts[-1](x, target).backward()
        optimizer.step()
    return parts


def own_parts(name, mesh):
    kind = getattr(hp_pipeline, name)
    stages = 4 if kind.shape in ("v", "loop") else 2
    placement = placed(kind.shape, 2, 2 if kind.shape == "loop" else None)
    rank = mesh["pp"].get_local_rank()
    return stages, {i: Part(i, stages).to(device_type()) for i, place in enumerate(placement) if place == rank}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def assert_close(parts, expected):
    for index, part in parts.items():
        for (name, one), other in zip(part.named_parameters(), expected[index].parameters(), strict=True):
            assert torch.allclose(full(one), other, rtol=1e-12, atol=1e-12), name
            assert torch.allclose(full(one.grad), other.grad, rtol=1e-12, atol=1e-12), name


@on_ranks(4)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZB1P", "ScheduleZBV", "ScheduleInterleaved1F1B"])
def test_tensor_parallel_stages(name):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "tp"))
    stages, parts = own_parts(name, mesh)
    for part in parts.values():
        parallelize_module(part, mesh["tp"], TENSOR)
    stage = [PipelineStage(part, index, stages) for index, part in parts.items()]
    schedule = getattr(hp_pipeline, name)(stage, 4, group=mesh["pp"].get_group())
    optimizer = torch.optim.SGD(nn.ModuleList(parts.values()).parameters(), lr=0.1, foreach=False)
    x, target = data()
    for _ in range(2):
        optimizer.zero_grad()
        schedule.run(x, target=target)
        optimizer.step()
    assert_close(parts, trained(stages))


@on_ranks(4)
def test_context_parallel_stages():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "cp"))
    stages, parts = own_parts("ScheduleZBV", mesh)
    for part in parts.values():
        parallelize_module(part, mesh["cp"], {"layer.attention": ContextParallel(load_balance=True)})
    stage = [PipelineStage(part, index, stages) for index, part in parts.items()]
    schedule = hp_pipeline.ScheduleZBV(stage, 2, group=mesh["pp"].get_group())
    optimizer = torch.optim.SGD(nn.ModuleList(parts.values()).parameters(), lr=0.1)
    x, target = (context_parallel_shard(each, mesh["cp"], load_balance=True) for each in data())
    for _ in range(2):
        optimizer.zero_grad()
        schedule.run(x, target=target)
        for part in parts.values():
            for parameter in part.parameters():  # the mean of the ranks' means, of equally many tokens
                collectives.all_reduce(parameter.grad, "avg", group=mesh["cp"].get_group())
        optimizer.step()
    assert_close(parts, trained(stages))


@on_ranks(4)
def test_gradients_of_sharded_weights_are_put_off():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "tp"))
    stages, parts = own_parts("ScheduleZB1P", mesh)
    ((index, part),) = parts.items()
    parallelize_module(part, mesh["tp"], TENSOR)
    schedule = hp_pipeline.ScheduleZB1P(PipelineStage(part, index, stages), 2, group=mesh["pp"].get_group())
    weights = [part.layer.up.weight, part.layer.down.weight, part.layer.attention.q.weight]
    there = {}

    def custom(step, run):
        run()
        there[str(step)[1:]] = {each.grad is not None for each in weights}

    for kind in (MetaStepType.BACKWARD_INPUT, MetaStepType.BACKWARD_WEIGHT):
        schedule.register_custom_function(kind, custom)
    x, target = data()
    schedule.run(x, target=target)
    assert (there["I0"], there["W0"]) == ({False}, {True})
