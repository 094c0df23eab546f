"""Memory: the bytes that a layer of experts saves for backward, by a formula, and against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import saved_bytes, sum_over_ranks

from hp_dtensor import init_device_mesh
from hp_moe import ExpertParallel
from hp_styles import parallelize_module
from hp_testing import device_type, on_ranks

pytestmark = pytest.mark.framework("torch")

HIDDEN, INNER, EXPERTS, CHOICES, TOKENS = 64, 32, 8, 4, 96


def experts() -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOICES
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    module: Any = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module


def inputs():
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, weights = (torch.randn(TOKENS, width, generator=generator) for width in (HIDDEN, CHOICES))
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES).indices
    return tokens.requires_grad_(), chosen, weights.requires_grad_()


@on_ranks(2)
@pytest.mark.parametrize("combine", ["fast", "exact"])
def test_a_layer_saves_the_inputs_of_its_products_and_one_output(combine):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("ep",))
    spread, whole = experts().to(device_type()), experts()  # theirs has no kernels on a simulated device
    parallelize_module(spread, mesh, ExpertParallel(combine=combine))
    own = [each.to(device_type()) for each in inputs()]
    floating, indices = saved_bytes(lambda: spread(*own), spread.parameters())
    theirs = sum(saved_bytes(lambda: whole(*inputs()), whole.parameters()))
    total = torch.tensor([floating, indices, theirs], dtype=torch.float64, device=device_type())
    sum_over_ranks(total)
    floating, indices, theirs = total.tolist()
    rows = 2 * TOKENS * CHOICES
    # A row's input, gate and up projection and their product; then its weight, where results are added up on their way,
    # and else its result beside it.
    assert floating == 4 * rows * (HIDDEN + 3 * INNER + (1 if combine == "fast" else HIDDEN + 1))
    assert indices <= 6 * 8 * rows
    if combine == "fast":
        assert floating + indices <= 0.75 * theirs
