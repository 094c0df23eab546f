"""Unmodified models of transformers, their experts over ranks, against one process in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from moe_models import OWN, Float64, average, build, experts, sum_over_ranks

from hp_dtensor import DTensor, init_device_mesh
from hp_moe import ExpertParallel, ExpertTensorParallel, TensorParallel
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.framework("torch")

ROWS, LENGTH = 8, 5


def compare(name, style, shape, axes, losses, steer=None):
    """Compare loss, gradients and weights after two steps; `losses` is the number of different losses."""
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=axes)
    single, parallel = build(name).to(device_type()), build(name).to(device_type())
    for model in (single, parallel):
        for module in experts(model) if steer else []:
            module.register_forward_pre_hook(steer)
    for module in experts(parallel):
        parallelize_module(module, mesh, style)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (single, parallel)]
    lot = dist.get_rank() * losses // dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    with Float64():
        for _ in range(2):
            tokens = torch.randint(64, (ROWS, LENGTH), generator=generator).to(device_type())
            loss = single(tokens, labels=tokens).loss
            loss.backward()
            own = tokens.chunk(losses)[lot]
            part = parallel(own, labels=own).loss
            part.backward()
            mean = part.detach().clone()
            sum_over_ranks(mean)
            torch.testing.assert_close(mean / dist.get_world_size(), loss.detach(), rtol=1e-12, atol=1e-12)
            largest = max(p.grad.abs().max() for p in single.parameters() if p.grad is not None)
            for (key, one), other in zip(single.named_parameters(), parallel.parameters(), strict=True):
                expected = torch.zeros_like(one) if one.grad is None else one.grad
                error = (average(other, losses) - expected).abs().max() / largest
                assert error < 1e-12, (key, error)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (key, one), other in zip(single.named_parameters(), parallel.parameters(), strict=True):
        whole = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(whole, one, rtol=1e-12, atol=1e-12, msg=key)


@on_ranks(2)
@pytest.mark.parametrize("name", OWN)
def test_families_equal_one_process(name):
    for combine in ("fast", "exact"):
        compare(name, ExpertParallel(combine=combine), (2,), ("ep",), 2)


@on_ranks(4)
@pytest.mark.parametrize("name", ["Qwen3MoeConfig", "GptOssConfig"])
def test_every_axis_equals_one_process(name):
    compare(name, ExpertParallel(), (4,), ("ep",), 4)  # two ranks with two experts, two with one
    compare(name, ExpertTensorParallel(), (2, 2), ("ep", "tp"), 2)
    compare(name, TensorParallel(), (4,), ("tp",), 1)


def all_on_one(module, inputs):
    tokens, chosen, weights = inputs
    return tokens, torch.tensor([3, 0], device=chosen.device).expand_as(chosen), weights


def none_on_the_last(module, inputs):
    tokens, chosen, weights = inputs
    return tokens, chosen % 3, weights  # twice the same expert for some


@on_ranks(2)
@pytest.mark.parametrize("steer", [all_on_one, none_on_the_last])
def test_any_balance_equals_one_process(steer):
    for combine in ("fast", "exact"):
        compare("Qwen3MoeConfig", ExpertParallel(combine=combine), (2,), ("ep",), 2, steer)
