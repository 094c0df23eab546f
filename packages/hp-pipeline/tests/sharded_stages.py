"""Stages whose parameters are sharded, by hp-fsdp or by torch's FSDP2, and the same in one process."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from pipeline_models import Net, Stage, batch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hp_dtensor
import hp_pipeline
from hp_fsdp import (
    fully_shard,
)
from hp_pipeline import (
    PipelineStage,
    placed,
)
from hp_platform import count_collectives
from hp_testing import device_type

ROWS = 12
KINDS = ["ours", "torch"]
REDUCE, GATHER = (  # torch's newer names, or the older ones
    f"{name}_single" if hasattr(dist, f"{name}_single") else older
    for name, older in (("reduce_scatter", "reduce_scatter_tensor"), ("all_gather", "all_gather_into_tensor"))
)


def meshes(kind):
    """Return the group of this rank's pipeline, and the mesh of the shards: pipelines of two, shards of two."""
    library = hp_dtensor if kind == "ours" else dist.device_mesh
    mesh = library.init_device_mesh(device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    return mesh["pp"].get_group(), mesh["dp"]


def shard(module, mesh, kind, **options):
    """Shard each block, and the rest of a stage."""
    function = fully_shard if kind == "ours" else torch_fully_shard
    groups = int(hasattr(module, "first") or hasattr(module, "head"))  # a middle stage has nothing else
    for each in module.parts.modules():
        if type(each).__name__ == "Block":
            each.in_place = False  # FSDP2 refuses writes to a module's inputs
            function(each, mesh=mesh, **options)
            groups += 1
    function(module, mesh=mesh, **options)
    return groups


def build(name, stages, micro_batches, kind, **options):
    """Return a schedule of sharded stages, how many groups they have, and the whole net."""
    net = Net(stages).double().to(device_type())
    group, mesh = meshes(kind)
    schedule = getattr(hp_pipeline, name)
    placement = placed(schedule.shape, 2, stages // 2 if schedule.shape == "loop" else None)
    rank = dist.get_rank(group)
    modules = {index: Stage(net, index) for index, place in enumerate(placement) if place == rank}
    groups = sum(shard(module, mesh, kind, **options) for module in modules.values())
    parts = [PipelineStage(module, index, stages) for index, module in modules.items()]
    return schedule(parts, micro_batches, group=group), groups


def own_rows(schedule):
    """Return this rank's part of the batch: pipelines of other shards have other rows."""
    shards = dist.get_world_size() // 2
    place = dist.get_rank() % shards
    return [tensor.chunk(shards)[place] for tensor in batch(ROWS, device_type())]


def modules_of(schedule):
    return nn.ModuleList(stage.submodule for stage in schedule.stages)


def trained(stages, steps, lr=0.1):
    net = Net(stages).double().to(device_type())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        net(*batch(ROWS, device_type())).backward()
        optimizer.step()
    return dict(net.named_parameters())


def assert_close(schedule, expected):
    for stage in schedule.stages:
        for name, parameter in stage.submodule.named_parameters():
            assert torch.allclose(parameter.full_tensor(), expected[name], rtol=1e-12, atol=1e-12), name
            gradient = parameter.grad.full_tensor()
            assert torch.allclose(gradient, expected[name].grad, rtol=1e-12, atol=1e-12), name


class Reductions:
    """Count the reductions of gradients, of hp-fsdp and of torch."""

    def __enter__(self):
        self.ours = count_collectives()
        self.theirs = mock.patch.object(dist, REDUCE, wraps=getattr(dist, REDUCE))
        self.counts, self.calls = self.ours.__enter__(), self.theirs.__enter__()
        return self

    def __exit__(self, *error):
        self.theirs.__exit__(*error)
        self.ours.__exit__(*error)
        self.number = self.counts["reduce_scatter"] + self.calls.call_count
