"""Gradients, counts and sums that other libraries have had wrong, each as a test that such a defect fails."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from moe_models import sum_over_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_moe import (
    ExpertParallel,
    ExpertTensorParallel,
    FeedForward,
    MoE,
    MoEAuxLossAutoScaler,
    TensorParallel,
    TokenChoiceTopKRouter,
    rebalance,
    update_expert_bias,
)
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def build(**options) -> MoE:
    torch.manual_seed(0)
    return MoE(6, 8, 4, top_k=2, **options).double().to(device_type())


def spread(style, shape=(2,), axes=("ep",), **options) -> tuple[MoE, MoE]:
    """Return a mixture in one process and the same over ranks."""
    single, moe = build(**options), build(**options)
    parallelize_module(moe, init_device_mesh(device_type(), shape, mesh_dim_names=axes), {"experts": style})
    return single, moe


def tokens(count: int) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(count, 6, dtype=torch.float64).to(device_type())


def same_experts(single: MoE, moe: MoE) -> None:
    for name in ("w1", "w2", "w3"):
        got, expected = getattr(moe.experts, name).grad.full_tensor(), getattr(single.experts, name).grad
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=name)


@on_ranks(2)
@pytest.mark.parametrize("first", [0, 1, 7])
@pytest.mark.parametrize("combine", ["fast", "exact"])
def test_experts_gradients_are_sums_over_tokens_however_many_a_rank_has(first, combine):
    """pytorch#160285: doubled by two ranks; titan PR 1166: ranks and experts without tokens hang."""
    single, moe = spread(ExpertParallel(combine=combine))
    x = tokens(8)
    single(x).square().sum().backward()
    own = x[:first] if dist.get_rank() == 0 else x[first:]
    moe(own).square().sum().backward()
    same_experts(single, moe)
    gate = moe.router.gate.weight.grad
    sum_over_ranks(gate)
    torch.testing.assert_close(gate, single.router.gate.weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("style", [TensorParallel(), ExpertTensorParallel()], ids=repr)
def test_a_router_above_sharded_features_has_its_whole_gradient_on_each_rank(style):
    """titan#1805, PR 1878 and PR 4054: a rank's share of it; Megatron#1622: features over ranks, experts over none."""
    ep = (1,) if style.mesh_axes == 2 else ()
    axes = ("ep", "tp") if style.mesh_axes == 2 else ("tp",)
    single, moe = spread(style, (*ep, 2), axes, shared_expert=FeedForward(6, 8))
    inputs = [tokens(8).requires_grad_() for _ in range(2)]
    for model, x in zip((single, moe), inputs, strict=True):
        model(x).square().sum().backward()
    same_experts(single, moe)
    for (name, one), other in zip(single.named_parameters(), moe.named_parameters(), strict=True):
        if not name.startswith("experts."):
            torch.testing.assert_close(other[1].grad, one.grad, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
@pytest.mark.parametrize("combine", ["fast", "exact"])
def test_rows_that_nobody_wrote_reach_no_result(combine):
    """titan#1237: rows past the last offset are uninitialised, and zero times NaN is NaN."""
    single, moe = spread(ExpertParallel(combine=combine))
    steer(moe)
    steer(single)
    x, filled = tokens(8), torch.utils.deterministic.fill_uninitialized_memory
    own = x.chunk(2)[dist.get_rank()].clone().requires_grad_()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN
    try:
        out = moe(own)
        out.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    single(x).square().sum().backward()
    same_experts(single, moe)
    assert own.grad.isfinite().all() and moe.router.gate.weight.grad.isfinite().all()


def steer(moe: MoE) -> None:
    """Let all tokens choose the experts 0 and 1."""
    moe.expert_bias[:2] = 9


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_tokens_are_counted_once_over_micro_batches_that_are_computed_again(reentrant):
    """Counts of recomputed blocks too change biases twice as fast; of recorded forwards alone, at times never."""
    _, moe = spread(ExpertParallel())
    for part in tokens(12).chunk(3):
        checkpoint(moe, part.requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert moe.tokens_per_expert.sum() == 24
    moe.eval()(tokens(4))
    assert moe.tokens_per_expert.sum() == 24
    update_expert_bias(moe, lr=0.5)
    assert set(moe.expert_bias.tolist()) <= {-0.5, 0.0, 0.5} and moe.expert_bias.any()
    assert not moe.tokens_per_expert.any()


@on_ranks(2)
def test_counts_of_different_layers_are_not_added_up():
    """Stages of a pipeline have other layers: their counts are of other experts."""
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"layer{rank}": build()})
    with pytest.raises(ValueError, match=rf"ranks have different layers.*this rank has layer{rank}\. Pass group="):
        update_expert_bias(stage)
    alone = DeviceMesh(device_type(), [rank], mesh_dim_names=("ep",))
    parallelize_module(stage, alone, {f"layer{rank}.experts": ExpertParallel(slots=1)})
    with pytest.raises(ValueError, match=rf"rebalance: ranks have .*has layer{rank}\.experts\. Pass group="):
        rebalance(stage)
    group = [dist.new_group([each]) for each in range(2)][rank]
    update_expert_bias(stage, group=group)
    rebalance(stage, group=group)


@on_ranks(2)
def test_a_rank_without_layers_is_an_error_of_all():
    """It raised alone, and the others waited for its counts."""
    stage = build() if dist.get_rank() else nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"this rank has {'the model itself' if dist.get_rank() else 'none'}"):
        update_expert_bias(stage)


@on_ranks(2)
@pytest.mark.parametrize("style", [ExpertParallel(), ExpertParallel("all_gather")], ids=repr)
def test_second_derivatives_are_refused(style):
    """Those of rows that have travelled were left out where something else had some: here a residual."""
    moe = MoE(8, 8, 4, top_k=2, use_grouped_mm=True).to(device_type())
    parallelize_module(moe.experts, init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",)), style)
    x = torch.randn(4, 8, device=device_type(), requires_grad=True)
    (gradient,) = torch.autograd.grad((moe(x) + x**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


@on_ranks(2)
def test_losses_beside_the_graph_are_scaled_by_micro_batches_and_not_by_recomputation():
    """A z-loss or balance loss of each of three micro-batches, scaled by a third, is that of their mean."""
    x = tokens(12)

    def gradient(recomputed: bool, parts: int) -> torch.Tensor:
        router = TokenChoiceTopKRouter(6, 4, top_k=2).double().to(device_type())
        torch.manual_seed(1)
        nn.init.normal_(router.gate.weight)

        def block(part):
            scores, _, _ = router(part)
            z = torch.logsumexp(router.gate(part), -1).square().mean()
            return MoEAuxLossAutoScaler.apply(scores, z)

        MoEAuxLossAutoScaler.set_loss_scale(1 / parts)
        try:
            for part in x.chunk(parts):
                run = checkpoint(block, part, use_reentrant=False) if recomputed else block(part)
                (run * 0).sum().backward()
        finally:
            MoEAuxLossAutoScaler.set_loss_scale(1.0)
        return router.gate.weight.grad

    expected = gradient(False, 1)
    for recomputed in (False, True):
        torch.testing.assert_close(gradient(recomputed, 3), expected, rtol=1e-12, atol=1e-14)


@on_ranks(1)
def test_a_shared_expert_is_not_in_the_auxiliary_loss():
    gates = []
    for shared in (None, FeedForward(6, 8)):
        moe = build(load_balance_coeff=0.5, shared_expert=shared)
        moe(tokens(8)).mul(0).sum().backward()
        gates.append(moe.router.gate.weight.grad)
    torch.testing.assert_close(gates[0], gates[1], rtol=0, atol=0)
    assert gates[0].abs().max() > 1e-4


@on_ranks(2)
def test_collectives_come_in_one_order_whatever_the_routing():
    """all_to_all in another order on one rank is a hang, or the rows of another layer."""
    _, moe = spread(ExpertParallel(combine="exact"))
    orders = []
    for x in (tokens(8), tokens(0), tokens(5)):
        if dist.get_rank() == 0:
            moe.expert_bias.uniform_(0, 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            moe(x.requires_grad_()).sum().backward()
        events = sorted((each for each in profile.events()), key=lambda each: each.time_range.start)
        orders.append([each.name for each in events if each.name.startswith(("c10d::", "hp_onesided:"))])
    everyone: list = [None, None]
    dist.all_gather_object(everyone, orders)
    assert orders[0] and everyone[0] == everyone[1] and orders[0] == orders[1] == orders[2]
