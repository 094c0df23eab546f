"""Weights of the same bits wherever experts are, with replicas, moving, and on any number of ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from deterministic_experts import Model, weights_after

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel, ExpertPlacement, place_experts
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks, run_ranks

pytestmark = pytest.mark.framework("torch")


@cache
def alone(steps: int) -> torch.Tensor:
    return run_ranks(1, weights_after, steps)[0]


@pytest.mark.parametrize(
    ("ranks", "steps", "job"),
    [
        (2, 3, {}),
        (4, 3, {}),
        (2, 3, {"slots": 4}),
        pytest.param(4, 3, {"slots": 1}, marks=pytest.mark.thorough),
        (4, 3, {"slots": 3}),
        (2, 3, {"moves": True, "slots": 1}),
        (4, 3, {"moves": True}),
        pytest.param(4, 20, {"moves": True, "slots": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_weights_have_the_same_bits(ranks, steps, job):
    for weights in run_ranks(ranks, weights_after, steps, **job):
        differ = (weights.view(torch.int32) != alone(steps).view(torch.int32)).sum()
        assert not differ, f"{differ} of {weights.numel()} weights differ"


def test_without_the_mode_bits_depend_on_ranks():
    assert not torch.equal(run_ranks(4, weights_after, 3, deterministic=False)[0], alone(3))


def test_sums_that_combine_on_the_way_are_refused():
    with pytest.raises(ValueError, match="deterministic=True with combine='fast', .* use combine='exact'"):
        ExpertParallel(deterministic=True)
    ExpertParallel(deterministic=True, combine="exact")


@on_ranks(2)
def test_gradients_that_would_be_summed_in_another_order_are_refused():
    torch.manual_seed(0)
    moe = Model().first.to(device_type())
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    parallelize_module(moe.experts, mesh, ExpertParallel(combine="exact", slots=1, deterministic=True))
    x = torch.randn(5, 12, device=device_type())
    moe(x).sum().backward()
    moe(x).sum().backward()  # a second micro-batch
    moe.experts.w1.grad *= 2
    with pytest.raises(RuntimeError, match="gradients that no backward pass of this step has left"):
        moe(x).sum().backward()
    moe.zero_grad(set_to_none=False)
    moe(x).sum().backward()
    once = moe.experts.w1.grad.clone()
    moe.zero_grad()
    place_experts(moe.experts, ExpertPlacement(ExpertPlacement.even(6, 2).home, ((), (1,), (), (), (), ()), 2))
    moe(x).sum().backward()
    assert torch.equal(moe.experts.w1.grad.to_local(), once.to_local())
    moe.zero_grad()
    for _ in range(2):  # an overflow, which a loss scaler looks for after the step's last pass
        (moe(x) * float("nan")).sum().backward()
    moe.zero_grad()
    with pytest.raises(RuntimeError, match="ran more than once in one backward pass"):
        (moe(x) + moe(x)).sum().backward()
    for _ in range(2):
        moe(x).sum().backward()
    torch.testing.assert_close(moe.experts.w1.grad.to_local(), 2 * once.to_local())
    parallelize_module(free := Model().first.to(device_type()), mesh, {"experts": ExpertParallel(combine="exact")})
    (free(x) + free(x)).sum().backward()
