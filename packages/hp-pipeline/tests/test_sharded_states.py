"""Shared weights, states, recomputation and swap in sharded stages, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipeline_models import Net, Stage, batch
from sharded_stages import (
    KINDS,
    ROWS,
    Reductions,
    assert_close,
    build,
    meshes,
    modules_of,
    own_rows,
    shard,
    trained,
)
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hp_pipeline
from hp_fsdp import (
    StateDictOptions,
    full_state_dict,
    fully_shard,
    get_optimizer_state_dict,
    load_full_state_dict,
)
from hp_offload import checkpoint_wrapper
from hp_pipeline import (
    CommComputeOverlap,
    PipelineStage,
    SharedParameterInfo,
    placed,
)
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


class Tied(nn.Module):
    """The first stage embeds tokens by a table, the last compares with its rows."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.index = index
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.table = nn.Linear(6, 7, bias=False, dtype=torch.float64)

    def forward(self, x, target=None):
        if self.index:
            return nn.functional.cross_entropy(self.table(torch.tanh(self.layer(x))), target)
        return torch.tanh(self.layer(self.table(x)[:, :6]))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_weights_are_shared(kind):
    group, mesh = meshes(kind)
    function = fully_shard if kind == "ours" else torch_fully_shard
    x, target = batch(ROWS, device_type())
    x = torch.cat([x, x[:, :2]], 1)
    whole = nn.ModuleList([Tied(0), Tied(1)]).to(device_type())
    whole[1].table = whole[0].table
    whole[1](whole[0](x), target).backward()
    index = dist.get_rank(group)
    module = Tied(index).to(device_type())
    if index == 0:
        function(module.table, mesh=mesh)
    function(module, mesh=mesh)
    stage = PipelineStage(module, index, 2, shared_parameters=[SharedParameterInfo("table.weight", (0, 1))])
    place = dist.get_rank() % 2
    rows = {"x": x.chunk(2)[place], "target": target.chunk(2)[place]}
    inputs = (rows["x"],), {"target": rows["target"]} if index else {}
    if kind == "ours":  # a flat group's shards depend on what else is in it
        with pytest.raises(ValueError, match=r"must have the same shape, dtype and layout on all; .* fully_shard\(l"):
            hp_pipeline.ScheduleZB1P(stage, 3, group=group).run(*inputs[0], **inputs[1])
        module = Tied(index).to(device_type())
        function(module.table, mesh=mesh)
        function(module, mesh=mesh)
        stage = PipelineStage(module, index, 2, shared_parameters=stage.shared_parameters)
    schedule = hp_pipeline.ScheduleZB1P(stage, 3, group=group)
    comparisons = []
    for runs in (1, 2):
        schedule.run(*inputs[0], **inputs[1])
        assert schedule._runner is not None
        comparisons.append(schedule._runner.shared)
        for name, parameter in module.named_parameters():
            expected = dict(whole[index].named_parameters())[name]
            assert torch.equal(parameter.full_tensor(), expected), name
            gradient = parameter.grad.full_tensor()
            assert torch.allclose(gradient, runs * expected.grad, rtol=1e-12, atol=1e-12), name
    assert comparisons[0] is comparisons[1], "the weights are compared once while they stay the same"


@on_ranks(4)
def test_a_sharded_stage_in_two_threads_is_refused():
    overlap = CommComputeOverlap()
    for stage in range(4):
        overlap.wrap_combine(torch.neg, is_last_layer=True, stage=stage)
    schedule, _ = build("ScheduleInterleaved1F1B", 4, 4, "ours")
    options = {"group": schedule.group, "overlap": overlap}
    schedule = hp_pipeline.ScheduleInterleaved1F1B(schedule.stages, 4, overlap_b_f=True, **options)
    pairs = [each for steps in schedule.exec_order.values() for each in steps if each.sub_steps]
    assert any(len({part.stage_index for part in each.sub_steps}) == 1 for each in pairs)
    x, target = own_rows(schedule)
    text = r"runs a forward and a backward of stage \d in two threads, but a module that fully_shard was called on"
    with pytest.raises(ValueError, match=text):
        schedule.run(x, target=target)
    alone = hp_pipeline.ScheduleInterleaved1F1B(schedule.stages, 4, overlap_b_f=True, group=schedule.group)
    x, target = x[:4], target[:4]  # micro-batches of a row
    losses = alone.run(x, target=target)
    net = Net(4).double().to(device_type())
    stages = [PipelineStage(Stage(net, each.stage_index), each.stage_index, 4) for each in schedule.stages]
    whole = hp_pipeline.ScheduleInterleaved1F1B(stages, 4, overlap_b_f=True, **options)
    torch.testing.assert_close(losses, whole.run(x, target=target))


@on_ranks(4)
def test_states_of_the_stages_make_up_that_of_the_whole_model():
    schedule, _ = build("ScheduleZBV", 4, 2, "ours")
    whole = Net(4).double().to(device_type())
    states = [full_state_dict(stage.submodule) for stage in schedule.stages]
    names = [name for state in states for name in state]
    dist.all_gather_object(everyone := [None] * dist.get_world_size(), names)
    assert sorted(everyone[0] + everyone[2]) == sorted(whole.state_dict())
    for state in states:
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
    own = modules_of(schedule)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in own]
    x, target = own_rows(schedule)
    schedule.run(x, target=target)
    for module, optimizer in zip(own, optimizers, strict=True):
        optimizer.step()
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(module, optimizer, options=options)["state"]
        assert sorted(state) == sorted(name for name, _ in module.named_parameters())
        first = dict(whole.named_parameters())
        assert all(state[name]["exp_avg"].shape == first[name].shape for name in state)
    for stage, state in zip(schedule.stages, states, strict=True):
        load_full_state_dict(stage.submodule, state)
        for name, value in full_state_dict(stage.submodule).items():
            assert torch.equal(value, whole.state_dict()[name])


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swap", [False, True])
def test_sharded_blocks_that_are_computed_again_or_swapped(swap, kind):
    net = Net(4).double().to(device_type())
    group, mesh = meshes(kind)
    rank, forwards = dist.get_rank(group), []
    modules = {index: Stage(net, index) for index, place in enumerate(placed("v", 2)) if place == rank}
    blocks = [each for module in modules.values() for each in module.modules() if type(each).__name__ == "Block"]
    for block in blocks:
        block.up.register_forward_pre_hook(lambda *_: forwards.append(1))
        if not swap:
            checkpoint_wrapper(block)
    groups = sum(shard(module, mesh, kind) for module in modules.values())
    parts = [PipelineStage(module, index, 4) for index, module in modules.items()]
    schedule = hp_pipeline.ScheduleZBV(parts, 3, group=group, swap=swap)
    x, target = own_rows(schedule)
    with Reductions() as reductions:
        schedule.run(x, target=target)
    assert reductions.number == groups
    assert len(forwards) == (1 if swap else 2) * 3 * len(blocks)
    assert_close(schedule, trained(4, 1, lr=0.0))
