"""Some families of each kind under plans; `nox -s families` runs all of them."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from family_cells import CELLS, judge, plan_of

from hp_plan import apply, build_model, verify
from hp_testing import on_ranks

pytestmark = [
    pytest.mark.framework("torch"),  # transformers' models are PyTorch's
    pytest.mark.not_on("torch-npu-sim", "torch-npu", reason="reduces float64 over ranks, which HCCL does not"),
]


def check(name, cell):
    found = judge(name, cell)
    assert found["verdict"] == "right", found
    return found


@pytest.mark.smoke
@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "bloom", "mixtral", "gpt_oss", "deepseek_v2", "qwen3_next", "mamba2"])
def test_causal_language_models(name):
    check(name, "padded, tp 2")


@on_ranks(2)
@pytest.mark.parametrize("name", ["bert", "t5", "bart", "whisper", "clip", "qwen2_vl"])
def test_encoders_pictures_and_sounds(name):
    assert check(name, "tp 2")["sharded"] > 0.5


@on_ranks(2)
@pytest.mark.parametrize("name", ["gemma2", "phi3", "qwen2_moe", "t5", "stablelm"])
def test_sequence_parallel(name):
    check(name, "tp 2, sequence")


@on_ranks(4)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gpt2"])
def test_fully_sharded_and_tensor_parallel(name):
    check(name, "fsdp 2 x tp 2")


@on_ranks(2)
def test_a_difference_is_seen():
    plan = plan_of(FAMILIES["mixtral"], CELLS["tp 2"])
    model = apply(build_model(plan), plan)
    weight = model.model.layers[0].mlp.experts.gate_up_proj.to_local()
    assert weight.shape == (4, 48, 32), "half of gate and half of up"
    one = build_model(plan).model.layers[0].mlp.experts.gate_up_proj
    rank = torch.distributed.get_rank()
    torch.testing.assert_close(weight, torch.cat([half.chunk(2, 1)[rank] for half in one.chunk(2, 1)], 1))


@on_ranks(2)
@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_verify_needs_no_kernel_for_float64_and_no_dropout(name):
    result = verify(plan_of(FAMILIES[name], CELLS["tp 2"]), steps=1, tolerance=1e-10)
    assert result.passed, (result.first, result.largest)
    expected = "dropout of p = 0.1 was set to 0: two programs don't draw alike"
    assert (expected in result.notes) == (name == "gpt2")
