"""Mixtures of experts of one's own, against programs written out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_models import sum_over_ranks

from hp_dtensor import DeviceMesh, init_device_mesh
from hp_moe import (
    ExpertParallel,
    ExpertTensorParallel,
    FeedForward,
    GroupedExperts,
    MoE,
    MoEAuxLossAutoScaler,
    TensorParallel,
    TokenChoiceTopKRouter,
    update_expert_bias,
)
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")


def build(**options) -> MoE:
    torch.manual_seed(0)
    return MoE(6, 8, 6, top_k=2, **options).double().to(device_type())


def written_out(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """Compute a mixture token by token."""
    out = []
    for token in x:
        scores = torch.sigmoid(moe.router.gate.weight @ token)
        total = torch.zeros_like(token)
        for expert in scores.topk(2).indices.tolist():
            w1, w2, w3 = (getattr(moe.experts, name)[expert] for name in ("w1", "w2", "w3"))
            run = lambda y: w2 @ (F.silu(w1 @ y) * (w3 @ y))  # noqa: B023, E731
            total = total + (run(token * scores[expert]) if moe.score_before_experts else scores[expert] * run(token))
        out.append(total + (moe.shared_expert(token) if moe.shared_expert is not None else 0))
    return torch.stack(out)


@on_ranks(1)
@pytest.mark.parametrize("before", [True, False])
def test_a_mixture_equals_one_written_out(before):
    moe = build(score_before_experts=before, shared_expert=FeedForward(6, 8), use_grouped_mm=before)
    x = torch.randn(9, 6, dtype=torch.float64, device=device_type(), requires_grad=True)
    got, expected = moe(x.view(3, 3, 6)).view(9, 6), written_out(moe, x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    parameters = [x, *moe.parameters()]
    for one, other in zip(
        torch.autograd.grad(got.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_second_derivatives_are_refused():
    experts = GroupedExperts(8, 8, 2, use_grouped_mm=True).to(device_type())
    x = torch.randn(9, 8, device=device_type(), requires_grad=True)
    if device_type() != "cpu":
        pytest.skip("products one after the other refuse it in torch's words")
    (grad,) = torch.autograd.grad(experts(x, [4, 5]).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


@on_ranks(4)
@pytest.mark.parametrize("before", [True, False])
def test_styles_of_grouped_experts_equal_one_process(before):
    rank = dist.get_rank()
    for style, shape, axes, losses in (
        (ExpertParallel(), (4,), ("ep",), 4),
        (ExpertTensorParallel(), (2, 2), ("ep", "tp"), 2),
        (TensorParallel(), (4,), ("tp",), 1),
    ):
        mesh = init_device_mesh(device_type(), shape, mesh_dim_names=axes)
        single, moe = build(score_before_experts=before), build(score_before_experts=before)
        parallelize_module(moe.experts, mesh, style)
        torch.manual_seed(5)
        x = torch.randn(8, 6, dtype=torch.float64).to(device_type())
        single(x).square().sum().backward()
        part = x.chunk(losses)[rank * losses // 4]
        out = moe(part)
        torch.testing.assert_close(out, single(x).chunk(losses)[rank * losses // 4], rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        for name in ("w1", "w2", "w3"):
            got, expected = getattr(moe.experts, name).grad.full_tensor(), getattr(single.experts, name).grad
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=f"{style} {name}")
        gate = moe.router.gate.weight.grad
        sum_over_ranks(gate)
        torch.testing.assert_close(gate * losses / 4, single.router.gate.weight.grad, rtol=1e-12, atol=1e-12)


def test_of_equal_scores_the_lower_expert_is_chosen():
    router = TokenChoiceTopKRouter(4, 8, top_k=3, score_func="softmax")
    torch.nn.init.zeros_(router.gate.weight)
    weights, chosen, scores = router(torch.randn(5, 4))
    assert chosen.tolist() == [[0, 1, 2]] * 5
    assert torch.allclose(weights, torch.full((5, 3), 0.125)) and scores.shape == (5, 8)


def test_limited_groups_and_biases_change_the_choice_and_not_the_score():
    router = TokenChoiceTopKRouter(8, 8, 2, "sigmoid", num_expert_groups=4, num_limited_groups=1, route_scale=2.0)
    logits = torch.tensor([[9.0, -9.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]])
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(8))
    weights, chosen, _ = router(logits)
    assert chosen.tolist() == [[2, 3]]  # the highest pair, not the group of the highest expert
    torch.testing.assert_close(weights, 2 * torch.sigmoid(torch.tensor([[3.0, 3.0]])))
    weights, chosen, _ = router(logits, torch.tensor([0, 0, 0, 0, 5.0, 6.0, 0, 0]))
    assert chosen.tolist() == [[5, 4]]
    torch.testing.assert_close(weights, 2 * torch.sigmoid(torch.tensor([[2.0, 2.0]])))


@on_ranks(2)
def test_biases_follow_the_tokens_of_all_ranks_once_a_step():
    moe = build()
    own = torch.tensor([[0, 1, 1, 5, 0, 0], [3, 0, 0, 1, 0, 1]])[dist.get_rank()]
    moe.tokens_per_expert += own.to(device_type())
    update_expert_bias(torch.nn.Sequential(moe), lr=0.25)
    assert moe.expert_bias.tolist() == [-0.25, 0.25, 0.25, -0.25, 0.25, 0.25]  # of 3, 1, 1, 6, 0, 1; the mean is 2
    assert not moe.tokens_per_expert.any()


@on_ranks(2)
def test_the_auxiliary_loss_is_that_of_whole_sequences():
    from hp_platform import get_platform

    groups = get_platform().groups
    moe = build(load_balance_coeff=0.5, sequence_partition_group=groups.default_group())
    torch.manual_seed(7)
    x = torch.randn(8, 6, dtype=torch.float64).to(device_type())
    moe(x.chunk(2)[dist.get_rank()]).mul(0).sum().backward()
    got = moe.router.gate.weight.grad
    sum_over_ranks(got)
    scores = torch.sigmoid(x @ moe.router.gate.weight.T)
    chosen = torch.zeros_like(scores).scatter_(1, scores.topk(2).indices, 1.0)
    loss = 0.5 * 6 * (chosen.mean(0) / 2 * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    (expected,) = torch.autograd.grad(loss, moe.router.gate.weight)
    torch.testing.assert_close(got / 2, expected, rtol=1e-12, atol=1e-12)
    MoEAuxLossAutoScaler.set_loss_scale(4.0)
    try:
        moe.zero_grad()
        moe(x.chunk(2)[dist.get_rank()]).mul(0).sum().backward()
    finally:
        MoEAuxLossAutoScaler.set_loss_scale(1.0)
    scaled = moe.router.gate.weight.grad
    sum_over_ranks(scaled)
    torch.testing.assert_close(scaled / 8, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((4, 2, 3), "top_k must be from 1 to the 2 experts, got 3"),
        ((4, 2, 1, "tanh"), "score_func is 'sigmoid' or 'softmax', got 'tanh'"),
        ((4, 6, 2, "sigmoid", 4, 1), "6 experts cannot be cut into 4 equal groups"),
        ((4, 6, 2, "sigmoid", 3), "go together, got 3 and None"),
        ((4, 6, 3, "sigmoid", 3, 1), "1 of 3 groups have 2 experts, top_k is 3"),
    ],
)
def test_routers_refuse_numbers_that_do_not_fit(arguments, text):
    with pytest.raises(ValueError, match=text):
        TokenChoiceTopKRouter(*arguments)
    for fitting in ((4, 2, 2), (4, 6, 2, "softmax"), (4, 6, 2, "sigmoid", 3, 1), (4, 6, 3, "sigmoid", 3, 2)):
        assert TokenChoiceTopKRouter(*fitting)(torch.randn(5, 4))[1].shape == (5, fitting[2])


@on_ranks(4)
def test_what_cannot_be_spread_is_refused():
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "tp"))
    with pytest.raises(ValueError, match="1 experts cannot be spread over 2 ranks"):
        parallelize_module(GroupedExperts(4, 4, 1), mesh["ep"], ExpertParallel())
    with pytest.raises(ValueError, match="3 experts with sharded features cannot be spread over 2 ranks"):
        parallelize_module(GroupedExperts(4, 4, 3), mesh, ExpertTensorParallel())
    parallelize_module(GroupedExperts(4, 4, 3), mesh["ep"], ExpertParallel())
    with pytest.raises(ValueError, match="experts of 5 inner features cannot be cut evenly over 2 ranks"):
        parallelize_module(GroupedExperts(4, 5, 2), mesh["tp"], TensorParallel())
    parallelize_module(GroupedExperts(4, 5, 2), DeviceMesh(device_type(), [dist.get_rank()]), TensorParallel())
    with pytest.raises(TypeError, match="Linear is not a module of experts: gate_up_proj must be a parameter"):
        parallelize_module(torch.nn.Linear(2, 2), mesh["ep"], ExpertParallel())
    for style in (ExpertParallel, ExpertTensorParallel):
        with pytest.raises(ValueError, match=f"{style.__name__}: combine is 'fast' or 'exact', got 'quick'"):
            style(combine="quick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is 'all_to_all', 'all_gather' or 'deredundency', got 'deepep'"):
        ExpertParallel("deepep")
