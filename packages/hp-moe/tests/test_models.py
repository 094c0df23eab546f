"""Unmodified models of transformers, their experts over ranks, against one process in float64."""

from __future__ import annotations

import pytest
import torch
from moe_runs import FAMILIES, ROUTINGS, Run, worst_error

from hp_testing import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.framework("torch")


def check(*runs: Run) -> None:
    for run in runs:
        error = worst_error(run)
        assert error < 1e-12, (run, error)


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_one_process(family):
    check(*(Run(family, "ep2", combine=combine) for combine in ("fast", "exact")))


@on_ranks(2)
@pytest.mark.parametrize("routing", ROUTINGS[1:])
def test_any_routing_equals_one_process(routing):
    check(Run("Qwen3MoeConfig", "ep2", routing, "exact"), Run("GptOssConfig", "ep2", routing, checkpointed=True))


@on_ranks(2)
def test_features_over_ranks_equal_one_process():
    check(Run("Qwen3MoeConfig", "tp2"), Run("GptOssConfig", "tp2"), Run("DeepseekV3Config", "etp1x2", "one"))


@on_ranks(4)
def test_experts_over_four_ranks_equal_one_process():
    check(Run("Qwen3MoeConfig", "ep4"), Run("GptOssConfig", "ep4", "empty", num_experts=8))


@on_ranks(4)
@pytest.mark.parametrize(
    "run",
    [
        Run("GptOssConfig", "etp2x2"),
        Run("Qwen3NextConfig", "etp2x2 x sp2", "empty"),
        Run("MixtralConfig", "ep2 x tp2", "one"),
        Run("DeepseekV3Config", "ep4 over dp2 x tp2", checkpointed=True),
        Run("OlmoeConfig", "ep2 x sp2", checkpointed=True),
        Run("Glm4MoeConfig", "ep4 over dp2 x sp2", "empty", "exact"),
    ],
    ids=lambda run: run.product,
)
def test_experts_beside_tensor_parallel_layers_equal_one_process(run):
    check(run)


@on_ranks(2)
def test_a_doubled_gradient_is_seen():
    def double(module, inputs):
        tokens, chosen, weights = inputs
        if tokens.requires_grad:
            tokens.register_hook(lambda grad: grad * (1 + 1e-9))
        return tokens, chosen, weights

    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: double(module, inputs) if hasattr(module, "_expert_layer") else None
    )
    try:
        assert worst_error(Run("MixtralConfig")) > 1e-12
    finally:
        handle.remove()
