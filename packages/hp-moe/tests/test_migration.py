"""Experts that move to other ranks, with all that belongs to them, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deterministic_experts import shuffled
from test_replicas import EXPERTS, build, compare, draw

from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_fsdp import fully_shard
from hp_moe import ExpertParallel, ExpertPlacement, ExpertTensorParallel, MoE, place_experts
from hp_optim import Muon
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

NAMES = ("w1", "w2", "w3")
ADAMW = partial(torch.optim.AdamW, lr=0.1, foreach=False)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
MUON = partial(Muon, lr=0.1)


def spread(style) -> MoE:
    shape, axes = ((2, 2), ("ep", "tp")) if isinstance(style, ExpertTensorParallel) else ((-1,), ("ep",))
    shape = (dist.get_world_size(),) if shape == (-1,) else shape
    moe = build()
    parallelize_module(moe.experts, init_device_mesh(device_type(), shape, mesh_dim_names=axes), style)
    return moe


@on_ranks(4)
@pytest.mark.parametrize(
    ("style", "optimizer"),
    [
        (ExpertParallel(), ADAMW),
        (ExpertParallel(), SGD),
        (ExpertParallel(), MUON),
        (ExpertTensorParallel(), ADAMW),
        (ExpertTensorParallel(), MUON),
    ],
    ids=["adamw", "sgd", "muon", "features-adamw", "features-muon"],
)
def test_optimizers_go_on_as_if_nothing_had_moved(style, optimizer):
    still, moving = spread(style), spread(style)
    steps = [optimizer(list(moe.experts.parameters())) for moe in (still, moving)]
    ranks = 2 if isinstance(style, ExpertTensorParallel) else 4
    generator = torch.Generator().manual_seed(2)
    for step in range(3):
        for name in NAMES:
            gradient = torch.randn(still.experts.get_parameter(name).shape, generator=generator, dtype=torch.float64)
            for moe in (still, moving):
                parameter = moe.experts.get_parameter(name)
                parameter.grad = distribute_tensor(
                    gradient.to(device_type()), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
        memory = [parameter.to_local().data_ptr() for parameter in moving.experts.parameters()]
        place_experts(moving.experts, shuffled(ranks, step), optimizer=steps[1])  # gradients and states move
        assert memory == [parameter.to_local().data_ptr() for parameter in moving.experts.parameters()]
        for each in steps:
            each.step()
        for name in NAMES:
            one, other = still.experts.get_parameter(name), moving.experts.get_parameter(name)
            assert torch.equal(other.full_tensor(), one.full_tensor()), (step, name)
            assert other.placements != one.placements
            for key, value in steps[0].state[one].items():
                if value.dim():
                    assert torch.equal(steps[1].state[other][key].full_tensor(), value.full_tensor()), key


@on_ranks(4)
def test_experts_that_moved_compute_as_before():
    single = build()
    for seed, style in enumerate((ExpertParallel(slots=2), ExpertParallel(combine="exact", slots=1))):
        moe = spread(style)
        place_experts(moe.experts, shuffled(4, seed, style.slots), optimizer=())
        single.zero_grad()
        compare(single, moe, 4)
    moe = spread(ExpertTensorParallel(slots=1))
    place_experts(moe.experts, shuffled(2, 3, 1), optimizer=())
    single.zero_grad()
    compare(single, moe, 2)


@on_ranks(2)
def test_a_checkpoint_of_one_placement_loads_in_another(tmp_path):
    path = [str(tmp_path)]
    dist.broadcast_object_list(path)
    saved, loaded = spread(ExpertParallel()), spread(ExpertParallel())
    whole = {name: parameter.detach().clone() for name, parameter in build().experts.named_parameters()}
    place_experts(saved.experts, shuffled(2, 0), optimizer=())
    place_experts(loaded.experts, shuffled(2, 1), optimizer=())
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    state = loaded.state_dict()
    dcp.save(saved.state_dict(), checkpoint_id=path[0])
    dcp.load(state, checkpoint_id=path[0])
    for name, expected in whole.items():
        assert torch.equal(saved.experts.get_parameter(name).full_tensor(), expected)
        assert torch.equal(loaded.experts.get_parameter(name).full_tensor(), expected)
    compare(build(), loaded, 2)
    third = spread(ExpertParallel())
    third.load_state_dict(saved.state_dict())
    compare(build(), third, 2)


@on_ranks(2)
def test_what_cannot_move_is_refused_on_all_ranks():
    moe = spread(ExpertParallel())
    swapped = ExpertPlacement((1, 0, 0, 1, 1, 0), ((),) * EXPERTS, 2)
    with pytest.raises(ValueError, match="states of their parameters have to go with them; pass optimizer="):
        place_experts(moe.experts, swapped)
    few = ExpertPlacement((1, 1, 0, 1, 1, 0), ((),) * EXPERTS, 2)
    with pytest.raises(ValueError, match=r"home to \[2, 4\] experts, but have memory for \[3, 3\]; swap homes"):
        place_experts(moe.experts, few, optimizer=())
    with pytest.raises(NotImplementedError, match="w1 is a parameter of none of the optimizers"):
        place_experts(moe.experts, swapped, optimizer=torch.optim.SGD([moe.router.gate.weight], lr=0.1))
    other = torch.optim.SGD(moe.experts.parameters(), lr=0.1)
    other.state[moe.experts.w2]["codes"] = torch.zeros(7)
    with pytest.raises(NotImplementedError, match="SGD's state 'codes' of .*w2 is not laid out as the parameter"):
        place_experts(moe.experts, swapped, optimizer=other)
    del other.state[moe.experts.w2]["codes"]
    if dist.get_rank():
        other.state[moe.experts.w2]["momentum_buffer"] = torch.zeros_like(moe.experts.w2)
    with pytest.raises(ValueError, match="were passed different placements, or optimizers with different states"):
        place_experts(moe.experts, swapped, optimizer=other)
    compare(build(), moe, 2)
    other.state[moe.experts.w2]["momentum_buffer"] = torch.zeros_like(moe.experts.w2)
    place_experts(moe.experts, swapped, optimizer=other)
    moe.zero_grad()
    compare(build(), moe, 2)
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("rest", "ep"))
    sharded = build()
    parallelize_module(sharded.experts, mesh["ep"], ExpertParallel())
    fully_shard(sharded.experts, mesh["rest"])
    with pytest.raises(NotImplementedError, match="w1 is placed .* place them before fully_shard.*Shard.1"):
        place_experts(sharded.experts, swapped, optimizer=())
    sharded = build()
    parallelize_module(sharded.experts, mesh["ep"], ExpertParallel())
    place_experts(sharded.experts, swapped, optimizer=())
    fully_shard(sharded.experts, mesh["rest"], shard_placement_fn=lambda parameter: Shard(1))
    torch.testing.assert_close(sharded(x := draw()), build()(x), rtol=1e-12, atol=1e-12)
