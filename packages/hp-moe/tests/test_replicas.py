"""Replicas of hot experts in use, against one process in float64."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from moe_models import sum_over_ranks

from hp_dtensor import init_device_mesh
from hp_fsdp import fully_shard
from hp_moe import (
    ExpertParallel,
    ExpertPlacement,
    ExpertTensorParallel,
    MoE,
    get_placement_state,
    place_experts,
    plan_replicas,
    rebalance,
    set_placement_state,
)
from hp_platform.frames import frame
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

EXPERTS, TOKENS = 6, 8


def build(**options) -> MoE:
    """Build a mixture where expert 1 gets nearly all tokens."""
    torch.manual_seed(0)
    moe = MoE(6, 8, EXPERTS, top_k=2, **options).double()
    with torch.no_grad():
        moe.router.gate.weight[1] = 2.0
    return moe.to(device_type())


def draw(seed: int = 5) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(TOKENS, 6, dtype=torch.float64).to(device_type())


def replicated(ranks: int, **holders: tuple[int, ...]) -> ExpertPlacement:
    """Place experts evenly, with replicas: ``e1=(2, 3)``."""
    home = ExpertPlacement.even(EXPERTS, ranks).home
    return ExpertPlacement(home, tuple(holders.get(f"e{expert}", ()) for expert in range(EXPERTS)), ranks)


def compare(single: MoE, moe: MoE, losses: int) -> None:
    """Compare results and gradients, of ranks with `losses` different parts of the tokens."""
    world = dist.get_world_size()
    lot = dist.get_rank() * losses // world
    x = draw()
    one, part = x.clone().requires_grad_(), x.chunk(losses)[lot].clone().requires_grad_()
    expected, out = single(one), moe(part)
    torch.testing.assert_close(out, expected.chunk(losses)[lot], rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    out.square().sum().backward()
    torch.testing.assert_close(part.grad, one.grad.chunk(losses)[lot], rtol=1e-12, atol=1e-12)
    for name in ("w1", "w2", "w3"):
        got = getattr(moe.experts, name).grad.full_tensor()
        torch.testing.assert_close(got, getattr(single.experts, name).grad, rtol=1e-12, atol=1e-12, msg=name)
    gate = moe.router.gate.weight.grad
    sum_over_ranks(gate)
    torch.testing.assert_close(gate * losses / world, single.router.gate.weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(4)
@pytest.mark.parametrize(
    ("style", "shape"),
    [
        (ExpertParallel(slots=2), (4,)),
        (ExpertParallel(combine="exact", slots=2), (4,)),
        (ExpertParallel("all_gather", slots=2), (4,)),
        (ExpertParallel("deredundency", slots=2), (2, 2)),
    ],
    ids=repr,
)
def test_replicas_equal_one_process(style, shape):
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("oep", "iep")[-len(shape) :])
    single, moe = build(), build()
    parallelize_module(moe.experts, mesh, style)
    for placement in (replicated(4, e1=(1, 2, 3)), replicated(4, e1=(3,), e5=(0, 1)), replicated(4)):
        place_experts(moe.experts, placement)
        for model in (single, moe):
            model.zero_grad()
        compare(single, moe, 4)


@on_ranks(4)
def test_replicas_of_sharded_features_equal_one_process():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "tp"))
    single, moe = build(), build()
    parallelize_module(moe.experts, mesh, ExpertTensorParallel(slots=1))
    place_experts(moe.experts, replicated(2, e1=(1,), e4=(0,)))
    compare(single, moe, 2)


@on_ranks(4)
def test_replicas_equal_one_process_where_experts_are_sharded_over_other_ranks():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("rest", "ep"))
    single, moe = build(), build()
    parallelize_module(moe.experts, mesh["ep"], ExpertParallel(slots=1))
    fully_shard(moe.experts, mesh["rest"]).set_reduce_op_type("sum")
    place_experts(moe.experts, replicated(2, e1=(1,), e4=(0,)))
    compare(single, moe, 4)


@on_ranks(4)
def test_hot_experts_get_replicas_by_the_tokens_of_all_ranks():
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("ep",))
    single, moe = build(), build()
    parallelize_module(moe, mesh, {"experts": ExpertParallel(slots=1)})
    moe(draw(dist.get_rank()))
    (placement,) = rebalance(moe).values()
    assert placement.home == ExpertPlacement.even(EXPERTS, 4).home
    assert placement.replicas[1], placement
    assert all(len(local) - placement.home.count(rank) <= 1 for rank, local in enumerate(placement.local))
    assert rebalance(moe)["experts"] == placement  # no tokens since: replicas stay
    compare(single, moe, 4)


@on_ranks(2)
def test_blocks_with_replicas_can_be_recomputed():
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    single, moe = build(), build()
    parallelize_module(moe.experts, mesh, ExpertParallel(slots=1))
    place_experts(moe.experts, replicated(2, e1=(1,)))
    run = moe.forward
    moe.forward = lambda x: checkpoint(run, x, use_reentrant=False)
    compare(single, moe, 2)


class Queue:
    def put_off(self, edges, compute):
        raise AssertionError


@on_ranks(2)
def test_replicas_under_split_backward_are_refused():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    moe = build()
    parallelize_module(moe.experts, mesh, ExpertParallel(slots=1))
    place_experts(moe.experts, replicated(2, e1=(1,)))
    with (
        frame(weights=Queue()),
        pytest.raises(NotImplementedError, match="Use a schedule without split backward, or no replicas"),
    ):
        moe(draw())
    moe(draw())
    place_experts(moe.experts, replicated(2))
    with frame(weights=Queue()):
        moe(draw())


@on_ranks(2)
def test_placements_that_do_not_fit_are_refused_on_all_ranks():
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    moe = build()
    with pytest.raises(TypeError, match="MoE has no experts over ranks; apply ExpertParallel"):
        place_experts(moe, replicated(2))
    with pytest.raises(ValueError, match="slots is the number of replicas on a rank, 0 or more, got -1"):
        ExpertParallel(slots=-1)
    parallelize_module(moe.experts, mesh, ExpertParallel(slots=1))
    for placement, text in (
        (ExpertPlacement.even(5, 2), "the placement is of 5 experts, the layer has 6"),
        (ExpertPlacement.even(EXPERTS, 3), "the placement is over 3 ranks, the experts are over 2"),
        (replicated(2, e0=(1,), e1=(1,)), r"rank 1 would hold 2 replicas, of the experts \(0, 1\), but has 1 slot:"),
    ):
        with pytest.raises(ValueError, match=text):
            place_experts(moe.experts, placement)
    mine = dist.get_rank() == 0
    with pytest.raises(ValueError, match="rank . was passed a placement|the placement is of 5 experts"):
        place_experts(moe.experts, ExpertPlacement.even(5, 2) if mine else replicated(2))
    with pytest.raises(ValueError, match="rank . and rank . were passed different placements"):
        place_experts(moe.experts, replicated(2, e0=(1,)) if mine else replicated(2))
    compare(build(), moe, 2)  # nothing has changed
    crowded = replicated(2, e0=(1,), e1=(1,))
    place_experts(moe.experts, plan_replicas([9, 9, 1, 1, 1, 1], crowded, slots=1))
    moe.zero_grad()
    compare(build(), moe, 2)
    parallelize_module(roomier := build(), mesh, {"experts": ExpertParallel(slots=2)})
    place_experts(roomier.experts, crowded)
    compare(build(), roomier, 2)
    parallelize_module(plain := build(), mesh, {"experts": ExpertParallel()})
    with pytest.raises(ValueError, match="MoE has no experts with slots for replicas; apply a style with some"):
        rebalance(plain)
    rebalance(moe)


@on_ranks(4)
def test_replicas_and_counts_are_those_of_a_state():
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("ep",))
    models = [build() for _ in range(3)]
    for moe, slots in zip(models, (1, 1, 2), strict=True):
        parallelize_module(moe, mesh, {"experts": ExpertParallel(slots=slots)})
    saved, loaded, roomier = models
    saved(draw(dist.get_rank()))
    rebalance(saved)
    saved(draw(dist.get_rank() + 4))
    state = json.loads(json.dumps(get_placement_state(saved)))
    assert sum(state["experts"]["load"]) == 4 * TOKENS * 2
    assert any(state["experts"]["replicas"])
    for moe in (loaded, roomier):
        set_placement_state(moe, state)
        assert moe.experts._expert_layer.placement == saved.experts._expert_layer.placement
        assert get_placement_state(moe) == state, "tokens count once"
    compare(build(), loaded, 4)
    assert get_placement_state(loaded, loads=False)["experts"]["load"] == [0] * EXPERTS
    # Over other ranks, or with less room, experts begin without replicas, and are counted on.
    for changed in ({"ranks": 2}, {"home": [0] * EXPERTS}, {"replicas": [[1, 2, 3], [2, 3], [0, 2, 3], [0], [0], [0]]}):
        other = build()
        parallelize_module(other, mesh, {"experts": ExpertParallel(slots=1)})
        set_placement_state(other, {"experts": {**state["experts"], **changed}})
        found = get_placement_state(other)["experts"]
        assert found["load"] == state["experts"]["load"] and not any(found["replicas"])
    for wrong, text in (({}, "the state lacks it"), ({"experts": {"load": [1]}}, "the state has 1 of it; set the")):
        with pytest.raises(ValueError, match=f"experts has 6 experts, and {text}"):
            set_placement_state(loaded, wrong)
    set_placement_state(loaded, get_placement_state(loaded))
    plain = build()
    parallelize_module(plain, mesh, {"experts": ExpertParallel()})
    with pytest.raises(ValueError, match="get_placement_state: MoE has no experts with slots"):
        get_placement_state(plain)
