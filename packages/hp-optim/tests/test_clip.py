"""One clip over dense, expert and tensor parallel parameters, then a step of chained optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_layouts import TENSOR_PARALLEL, give, lay_out
from optim_models import Net, net
from torch import nn

from hp_dtensor import DeviceMesh, DTensor, Shard, init_device_mesh
from hp_fsdp import clip_grad_norm_, fully_shard, global_grad_norm
from hp_optim import get_hyper_optimizer
from hp_platform import count_collectives, get_platform
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")
EXPERTS = {"experts.up": [Shard(0)], "experts.down": [Shard(0)]}


def lay_experts(model: nn.Module, mesh: Any) -> None:
    """Experts on the ranks of an axis; nothing else."""
    for name, placements in EXPERTS.items():
        module, _, key = name.rpartition(".")
        holder = model.get_submodule(module)
        lay_out(holder, {key: placements}, mesh)


def dense_and_experts(model: Net, options: dict[str, Any]) -> None:
    """Experts on one axis and sharded over the other one, the rest sharded over all four ranks."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "ep"))
    lay_experts(model, mesh["ep"])
    fully_shard(model.experts, mesh["dp"], **options)
    fully_shard(model, mesh["dp", "ep"]._flatten("all"), **options)


def dense_experts_and_slices(model: Net, options: dict[str, Any]) -> None:
    """Tensor parallel layers and experts on one axis; all of it sharded over the other one."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    lay_out(model, {**TENSOR_PARALLEL, **EXPERTS}, mesh["tp"])
    fully_shard(model, mesh["dp"], **options)


def optimizer_of(model: nn.Module) -> Any:
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    return get_hyper_optimizer(model, matrices, ["*.bias"], {"lr": 0.03}, {"lr": 0.01})


def trained(model: nn.Module, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int]:
    """Four steps, clipped to half of the norm; the norms, the weights, the collectives of one clip."""
    optimizer, norms, collectives = optimizer_of(model), [], 0
    for step in range(4):
        give(model, step, dtype)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with count_collectives() as counts:
            norm = clip_grad_norm_(parameters, 12.0)
        collectives = sum(counts.values())
        norms.append(norm)
        torch.testing.assert_close(float(global_grad_norm(parameters)), 12.0, rtol=1e-5, atol=0)
        optimizer.step()
    weights = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in model.named_parameters()
    }
    return norms, weights, collectives


@on_ranks(4)
@pytest.mark.parametrize("lay", [dense_and_experts, dense_experts_and_slices])
def test_a_clip_is_one_collective_and_that_of_one_process(lay: Callable[[Net, dict[str, Any]], None]):
    torch.set_num_threads(1)
    model, truth = net(torch.float64).to(device_type()), net(torch.float64).to(device_type())
    lay(model, {})
    norms, weights, collectives = trained(model, torch.float64)
    reference, expected, none = trained(truth, torch.float64)
    assert (collectives, none) == (1, 0)
    torch.testing.assert_close(torch.stack(norms), torch.stack(reference), rtol=1e-12, atol=0)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)


@on_ranks(4)
def test_deterministic_clips_have_the_same_bits_for_any_number_of_data_parallel_ranks():
    torch.set_num_threads(1)
    model, truth = net(torch.float32).to(device_type()), net(torch.float32).to(device_type())
    dense_and_experts(model, {"deterministic": True})
    norms, weights, _ = trained(model, torch.float32)
    reference, expected, _ = trained(truth, torch.float32)
    torch.testing.assert_close(torch.stack(norms), torch.stack(reference), rtol=1e-6, atol=0)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)
    if dist.get_rank() < 2:
        model = net(torch.float32).to(device_type())
        mesh = DeviceMesh(device_type(), [[0, 1]], mesh_dim_names=("dp", "ep"))
        lay_experts(model, mesh["ep"])
        fully_shard(model.experts, mesh["dp"], deterministic=True)
        fully_shard(model, mesh["dp", "ep"]._flatten("all"), deterministic=True)
        fewer, own, _ = trained(model, torch.float32)
        assert torch.equal(torch.stack(norms), torch.stack(fewer))
        for name, weight in own.items():
            assert torch.equal(weights[name], weight), name
    get_platform().collectives.barrier()
