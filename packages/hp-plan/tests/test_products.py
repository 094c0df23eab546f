"""Some of the random products and of the sabotage of `nox -s products`: what their judges say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_testing import on_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
from product_runs import judge, judge_sabotage
from products import Product, Sabotaged, draw, sabotaged

pytestmark = [
    pytest.mark.framework("torch"),  # transformers' models are PyTorch's
    pytest.mark.not_on("torch-npu-sim", "torch-npu", reason="reduces float64 over ranks, which HCCL does not"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, for some families
]

FAMILIES = ("llama", "mistral", "qwen2", "phi3", "mixtral", "qwen3_moe", "olmoe")
MESHES = ({"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "ep": 2})


def product_of(mesh) -> Product:
    """The first product of a mesh and these families that has a habit, of the numbers in their order."""
    products = (draw(number) for number in range(1000))
    return next(each for each in products if each.mesh == mesh and each.habits and each.family in FAMILIES)


@on_ranks(2)
@pytest.mark.parametrize("mesh", MESHES, ids=" ".join)
def test_a_product(mesh):
    said = judge(product_of(mesh))
    assert (said["verdict"], said["verify"], said["lint"]) == ("right", "passed", []), said


@on_ranks(2)
def test_what_differs_is_wrong_and_verify_says_so():
    said = judge_sabotage("samples are rolled", "dp_shard")
    assert (said["verdict"], said["verify"]) == ("wrong", "failed"), said
    said = judge_sabotage("samples are rolled", "tp")
    assert (said["verdict"], said["verify"]) == ("right", "passed"), said
    said = judge_sabotage("the place in the part", "cp")
    assert (said["verdict"], said["verify"]) == ("refused", "failed"), said
    assert Sabotaged("llama", sabotaged("pp"), kind="nothing").plan().mesh.pp == 2
