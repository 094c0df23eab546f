"""Stages whose parameters are sharded, by hp-fsdp and by torch's FSDP2, against one process in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hp_dtensor
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
    MetaStepType,
    PipelineError,
    PipelineStage,
    SharedParameterInfo,
    lower,
    placed,
)
from hp_platform import count_collectives
from hp_testing import device_type, on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from pipeline_models import Net, Stage, batch

pytestmark = pytest.mark.framework("torch")

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


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("Schedule1F1B", 2),
        ("ScheduleZB1P", 2),
        ("ScheduleInterleaved1F1B", 4),
        ("ScheduleZBV", 4),
        ("ScheduleDualPipeV", 4),
    ],
)
def test_sharded_stages_equal_one_process(name, stages, kind):
    schedule, groups = build(name, stages, 3, kind)
    own = modules_of(schedule)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    x, target = own_rows(schedule)
    for _ in range(2):
        optimizer.zero_grad()
        with Reductions() as reductions:
            schedule.run(x, target=target)
        assert reductions.number == groups
        optimizer.step()
    assert_close(schedule, trained(stages, 2))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_gathered_as_long_as_the_schedule_says(kind):
    schedule, _ = build("ScheduleInterleaved1F1B", 4, 2, kind)
    x, target = own_rows(schedule)
    whole = {id(stage): dict(Net(4).named_parameters()) for stage in schedule.stages}
    seen = []

    def custom(step, run):
        run()
        for stage in schedule.stages:
            gathered = {
                tuple(parameter.shape) == tuple(whole[id(stage)][name].shape) and not hasattr(parameter, "placements")
                for name, parameter in stage.submodule.named_parameters()
            }
            seen.append((str(step), stage.stage_index, gathered))

    for step_type in (MetaStepType.FORWARD, MetaStepType.BACKWARD, MetaStepType.RESHARD):
        schedule.register_custom_function(step_type, custom)
    schedule.run(x, target=target)
    assert seen
    for step, stage, gathered in seen:
        assert gathered == {"FRS" not in step and step.startswith(str(stage))}, (step, stage)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "place"), [("Schedule1F1B", "0B1"), ("ScheduleZB1P", "1F1"), ("ScheduleZB1P", "0W1")])
def test_a_stage_that_raises_on_one_rank_or_all_leaves_the_next_run_working(name, place, kind):
    schedule, groups = build(name, 2, 3, kind)
    x, target = own_rows(schedule)
    failing: list[set[int]] = []

    def custom(step, run):
        if failing and str(step) == place and dist.get_rank() % 2 in failing[0]:
            raise ArithmeticError("too hot")
        run()

    for step_type in (MetaStepType.FORWARD, MetaStepType.BACKWARD, MetaStepType.BACKWARD_WEIGHT):
        schedule.register_custom_function(step_type, custom)
    schedule.run(x, target=target)
    own = modules_of(schedule)
    for shards in ({0, 1}, {1}):
        failing.append(shards)
        if dist.get_rank() % 2 in shards:
            with pytest.raises(PipelineError, match=f"{place}: ArithmeticError: too hot"):
                schedule.run(x, target=target)
        else:
            schedule.run(x, target=target)
        failing.clear()
        own.zero_grad()
        with Reductions() as reductions:
            schedule.run(x, target=target)
        assert reductions.number == groups
        assert_close(schedule, trained(2, 1, lr=0.0))


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_orders_with_steps_of_sharding(kind):
    schedule, groups = build("Schedule1F1B", 2, 2, kind)
    x, target = own_rows(schedule)
    computing = schedule.exec_order
    schedule.exec_order = lower(computing, schedule.pipeline)
    with pytest.raises(
        ValueError, match=r"The parameters of the stages \[\d\] are sharded, but exec_order has no REDUCE"
    ):
        schedule.run(x, target=target)
    schedule.exec_order = lower(computing, schedule.pipeline, sharded=[0, 1])
    with Reductions() as reductions:
        schedule.run(x, target=target)
    assert reductions.number == groups
    assert_close(schedule, trained(2, 1, lr=0.0))


@on_ranks(4)
def test_deterministic_shards_give_the_bits_of_one_pipeline_stage():
    micro_batches = 2
    net = Net(2).double().to(device_type())
    _, mesh = meshes("ours")
    stages = [Stage(net, index) for index in range(2)]
    for stage in stages:
        shard(stage, mesh, "ours", deterministic=True)
    schedule, groups = build("Schedule1F1B", 2, micro_batches, "ours", deterministic=True)
    x, target = own_rows(schedule)
    for micro, (a, b) in enumerate(zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True)):
        for stage in stages:
            stage.set_requires_gradient_sync(micro == micro_batches - 1)
        (stages[1](stages[0](a), b) / micro_batches).backward()
    for _ in range(2):
        schedule.run(x, target=target)
        for stage in schedule.stages:
            expected = dict(stages[stage.stage_index].named_parameters())
            for name, parameter in stage.submodule.named_parameters():
                assert torch.equal(parameter.grad.full_tensor(), expected[name].grad.full_tensor()), name
            stage.submodule.zero_grad()
    split, _ = build("ScheduleZB1P", 2, micro_batches, "ours", deterministic=True)
    with pytest.raises(PipelineError, match="puts its weights' gradients off"):
        split.run(x, target=target)


@on_ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_runs_add_up_with_no_further_gathers(kind):
    schedule, _ = build("ScheduleZBV", 4, 2, kind)
    x, target = own_rows(schedule)
    gathers = []
    for _ in range(2):
        with count_collectives() as counts, mock.patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as calls:
            schedule.run(x, target=target)
        gathers.append(counts["all_gather"] + calls.call_count)
    assert gathers[0] == gathers[1] + 1, "in the first run the pipeline's ranks compare shared weights"
    expected = trained(4, 1, lr=0.0)
    for stage in schedule.stages:
        for name, parameter in stage.submodule.named_parameters():
            twice = 2 * expected[name].grad
            assert torch.allclose(parameter.grad.full_tensor(), twice, rtol=1e-12, atol=1e-12), name


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
    for runs in (1, 2):
        schedule.run(*inputs[0], **inputs[1])
        for name, parameter in module.named_parameters():
            expected = dict(whole[index].named_parameters())[name]
            assert torch.equal(parameter.full_tensor(), expected), name
            gradient = parameter.grad.full_tensor()
            assert torch.allclose(gradient, runs * expected.grad, rtol=1e-12, atol=1e-12), name


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
