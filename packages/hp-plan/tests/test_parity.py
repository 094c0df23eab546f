"""A transformers model under a plan does what it does in one process: loss, every gradient, every weight."""

from __future__ import annotations

import pytest

from hp_plan import ParallelPlan, verify
from hp_testing import on_ranks

pytestmark = pytest.mark.framework("torch")  # transformers' models are PyTorch's

FAMILIES = ("Llama", "Qwen3", "Mistral")
SOME = ("Llama", "Qwen3", pytest.param("Mistral", marks=pytest.mark.thorough))
OTHERS = tuple(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES[1:])
TOLERANCE = 1e-10


def small_plan(family: str, mesh: dict[str, int], *, styles: str = "auto", attention: str = "sdpa") -> ParallelPlan:
    """Two layers, and sizes that 3 ranks don't divide wherever heads needn't be whole."""
    heads = 2 * mesh.get("tp", 1) if mesh.get("tp", 1) != 3 else 3
    overrides = {
        "vocab_size": 37,
        # transformers' llama wants a multiple of the heads.
        "hidden_size": heads * 7 if family == "Llama" else 26,
        "intermediate_size": 43,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": mesh.get("tp", 1),
        "head_dim": 4,
        "attn_implementation": attention,
        "tie_word_embeddings": family == "Qwen3",
    }
    if family == "Mistral":
        overrides["sliding_window"] = 5
    return ParallelPlan.from_dict(
        {
            "model": {"config": f"{family}Config", "overrides": overrides},
            "mesh": mesh,
            "styles": styles,
            "fsdp": {} if set(mesh) == {"tp"} and mesh["tp"] > 1 else {"groups": ["model.layers.*"]},
            "data": {"batch_size": mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1) * 2, "sequence_length": 8},
            "run": {"grad_clip": 0.5},
        }
    )


def check(plan: ParallelPlan) -> None:
    result = verify(plan, tolerance=TOLERANCE)
    assert result.passed, f"{result.first} differs: {result.largest:.1e}"


@on_ranks(3, thorough=(1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel(family, ranks):
    check(small_plan(family, {"tp": ranks}))


@on_ranks(2, thorough=(3,))
@pytest.mark.parametrize(
    "family", ["Llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES[1:])]
)
def test_tensor_parallel_with_eager_attention(family, ranks):
    check(small_plan(family, {"tp": ranks}, attention="eager"))


@on_ranks(3, thorough=(2, 4))
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_and_sequence_parallel(family, ranks):
    check(small_plan(family, {"tp": ranks}, styles="auto-sequence"))


@on_ranks(3, thorough=(1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_fully_sharded(family, ranks):
    check(small_plan(family, {"dp_shard": ranks}, attention="eager"))


@on_ranks(4)
@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("styles", ["auto", "auto-sequence"])
def test_fully_sharded_and_tensor_parallel(family, styles):
    check(small_plan(family, {"dp_shard": 2, "tp": 2}, styles=styles))


@on_ranks(4, thorough=(2,))
@pytest.mark.parametrize("family", SOME)
def test_replicated_and_fully_sharded(family, ranks):
    check(small_plan(family, {"dp_replicate": 2, "dp_shard": ranks // 2}))


@pytest.mark.thorough  # test_pipelined.py has three axes, too, and each two of these are above
@on_ranks(8)
def test_three_axes():
    check(small_plan("Qwen3", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}))
