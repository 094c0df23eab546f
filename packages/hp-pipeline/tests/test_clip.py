"""Norms of gradients and optimizers over the stages of a pipeline, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_shared import Table, tokens
from torch import nn

import hp_pipeline
from hp_dtensor import init_device_mesh
from hp_fsdp import clip_grad_norm_, fully_shard, global_grad_norm
from hp_optim import get_hyper_optimizer
from hp_pipeline import PipelineStage, SharedParameterInfo, placed
from hp_testing import device_type, on_ranks

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="stages of the host's memory, from which hccl does not send"),
]

MICRO_BATCHES = 2


def pipeline(name, shape, stages):
    """Return a schedule of stages that share a table, and this rank's modules."""
    rank = dist.get_rank()
    own = {}
    for index in [index for index, place in enumerate(placed(shape, 2)) if place == rank]:
        own[index] = Table(index, stages, next((each.table for each in own.values()), None))
    modules = nn.ModuleList(own.values())
    info = SharedParameterInfo("table", tuple(range(stages)))
    parts = [PipelineStage(module, index, stages, shared_parameters=[info]) for index, module in own.items()]
    return getattr(hp_pipeline, name)(parts, MICRO_BATCHES), modules, own


def reference(stages):
    modules = [Table(0, stages)]
    modules += [Table(index, stages, modules[0].table) for index in range(1, stages)]
    return nn.ModuleList(modules)


def whole_gradients(modules, rows=4):
    for x, target in zip(*(row.chunk(MICRO_BATCHES) for row in tokens(rows)), strict=True):
        for module in modules[:-1]:
            x = module(x)
        (modules[-1](x, target) / MICRO_BATCHES).backward()


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(("name", "shape", "stages"), [("Schedule1F1B", "line", 2), ("ScheduleZBV", "v", 4)])
def test_the_norm_counts_shared_weights_once(name, shape, stages, norm_type):
    schedule, modules, own = pipeline(name, shape, stages)
    schedule.run(*(tokens(4)[:1]), target=tokens(4)[1])
    whole = reference(stages)
    whole_gradients(whole)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
    assert len(schedule.copies()) == dist.get_rank()
    options = {"group": schedule.group, "copies": schedule.copies()}
    before = global_grad_norm(modules.parameters(), norm_type, **options)
    norm = clip_grad_norm_(modules.parameters(), 0.01, norm_type, **options)
    assert torch.equal(norm, before) and norm.dtype is torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    everyone = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(everyone, norm)
    assert torch.equal(*everyone)
    for index, module in own.items():
        for one, other in zip(module.parameters(), whole[index].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


@on_ranks(4)
def test_the_norm_of_sharded_stages():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(5, 5, dtype=torch.float64) for _ in range(4)))
    x = torch.randn(4, 5, dtype=torch.float64)
    layers(x).pow(2).mean().backward()
    expected = nn.utils.get_total_norm([each.grad for each in layers.parameters()])
    index, place = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    own = nn.Sequential(*(nn.Linear(5, 5, dtype=torch.float64) for _ in range(4)))[2 * index : 2 * index + 2]
    module = Last(own) if index else own
    fully_shard(module.to(device_type()), mesh["dp"])
    schedule = hp_pipeline.Schedule1F1B(PipelineStage(module, index, 2), 2, group=mesh["pp"].get_group())
    schedule.run(x.chunk(2)[place].to(device_type()))
    norm = global_grad_norm(module.parameters(), group=schedule.group)
    torch.testing.assert_close(norm.cpu(), expected, rtol=1e-12, atol=0)


class Last(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x).pow(2).mean()


@on_ranks(2)
@pytest.mark.parametrize(("name", "shape", "stages"), [("Schedule1F1B", "line", 2), ("ScheduleZBV", "v", 4)])
def test_optimizers_step_as_in_one_process(name, shape, stages):
    schedule, modules, own = pipeline(name, shape, stages)
    whole = reference(stages)
    split = [["*layer.weight"], ["*layer.bias", "*table"], {"lr": 0.02}, {"lr": 0.01}]
    optimizers = get_hyper_optimizer(modules, *split), get_hyper_optimizer(whole, *split)
    x, target = tokens(4)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        schedule.run(x, target=target)
        whole_gradients(whole)
        clip_grad_norm_(modules.parameters(), 0.1, group=schedule.group, copies=schedule.copies())
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
    for index, module in own.items():
        for one, other in zip(module.parameters(), whole[index].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)  # Muon's matrices are orthogonalised
