"""Some of the random products and of the sabotage of `nox -s products`: what their judges say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from product_runs import judge, judge_sabotage, judge_training
from products import Product, Sabotaged, draw, sabotaged
from small_models import VOCABULARY, Swept, build

from hp_testing import on_ranks

pytestmark = [
    pytest.mark.framework("torch"),  # transformers' models are PyTorch's
    pytest.mark.not_on("torch-npu-sim", "torch-npu", reason="reduces float64 over ranks, which HCCL does not"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, for some families
]

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "mixtral", "qwen3_moe", "olmoe")
MESHES = (
    *(pytest.param(mesh, marks=pytest.mark.thorough) for mesh in ({"dp_shard": 2}, {"tp": 2}, {"cp": 2})),
    {"pp": 2},
    {"tp": 2, "ep": 2},
)


def product_of(mesh) -> Product:
    """The first product of a mesh and these families that has a habit, of the numbers in their order."""
    products = (draw(number) for number in range(1000))
    return next(each for each in products if each.mesh == mesh and each.habits and each.family in FAMILIES)


@on_ranks(2)
@pytest.mark.parametrize("mesh", MESHES, ids=" ".join)
def test_a_product(mesh):
    said = judge(product_of(mesh))
    assert (said["verdict"], said["verify"], said["lint"]) == ("right", "passed", []), said


SIZES: dict[str, Any] = {"d_model": 32, "vocab_size": VOCABULARY}
SWITCH: dict[str, Any] = {
    **SIZES,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_ff": 48,
    "d_kv": 8,
    "num_experts": 4,
}
DBRX: dict[str, Any] = {**SIZES, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
DBRX["attn_config"] = {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}
DBRX["ffn_config"] = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}


def trained(made: Swept, mesh: dict[str, int]) -> dict[str, Any]:
    """Judge a class that the sweep finds no small configuration of, or whose verdict has to stay."""
    tables = {"mesh": mesh, "run": {"dtype": "float64"}, "data": {"sequence_length": 8, "batch_size": 4}}
    return judge_training(replace(made, tables={**tables, "optimizer": {"name": "sgd", "lr": 0.1}}))


@on_ranks(2)
def test_names_made_of_tensors_under_tp():
    overrides = {**SWITCH, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    said = trained(Swept("SwitchTransformersConfig", {}, task="seq2seq-lm", overrides=overrides), {"tp": 2})
    assert said["verdict"] == "right", said


@on_ranks(2)
def test_stages_of_dbrx():
    said = trained(Swept("DbrxConfig", {}, overrides=DBRX), {"pp": 2})
    assert said["verdict"] == "right", said


@on_ranks(2)
def test_a_model_of_sound_and_text_whose_parts_differ_is_refused():
    said = trained(build("causal-lm", "MoshiConfig"), {"cp": 2})
    assert said["verdict"] == "refused" and "MoshiForCausalLM computes something else" in said["detail"], said


@on_ranks(2)
def test_what_differs_is_wrong_and_verify_says_so():
    said = judge_sabotage("samples are rolled", "dp_shard")
    assert (said["verdict"], said["verify"]) == ("wrong", "failed"), said
    said = judge_sabotage("samples are rolled", "tp")
    assert (said["verdict"], said["verify"]) == ("right", "passed"), said
    said = judge_sabotage("the place in the part", "cp")
    assert (said["verdict"], said["verify"]) == ("refused", "failed"), said
    assert Sabotaged("llama", sabotaged("pp"), kind="nothing").plan().mesh.pp == 2
