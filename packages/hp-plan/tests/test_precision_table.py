"""The table of docs/how-to/low-precision.md: what `mxfp8` goes with, and what of `float8-rowwise` has no other test."""

from __future__ import annotations

from typing import Any

import pytest

from hp_plan import ParallelPlan, verify
from hp_testing import on_ranks

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
LLAMA = {"config": "LlamaConfig", "overrides": {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}}
FOUR = {**LLAMA, "overrides": {**LLAMA["overrides"], "num_hidden_layers": 4}}
MIXTRAL = {"config": "MixtralConfig", "overrides": {**LLAMA["overrides"], "num_local_experts": 4}}
SHARDED = {"dp_shard": 2}
BLOCKS = ["model.layers.*"]


def schedule(name: str) -> dict[str, Any]:
    return {"model": FOUR, "pipeline": {"schedule": name, "micro_batches": 4}}


USUAL: list[tuple[dict[str, int], dict[str, Any]]] = [
    (SHARDED, {"memory": {"recompute": BLOCKS}}),
    (SHARDED, {"memory": {"homes": {"model.layers.*": "host"}}}),
    ({"tp": 2}, {"styles": "auto-sequence"}),
    ({"pp": 2}, schedule("zbv")),
    ({"dp_shard": 2, "ep": 2}, {"model": MIXTRAL, "precision": {"experts": "mxfp8"}}),
]
THOROUGH: list[tuple[dict[str, int], dict[str, Any]]] = [
    (SHARDED, {}),
    ({"cp": 2}, {}),
    ({"dp_replicate": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"pp": 2}, schedule("gpipe")),
    ({"pp": 2}, schedule("interleaved")),
    ({"pp": 2}, {"pipeline": {"schedule": "zb1p", "micro_batches": 4}}),
    ({"dp_shard": 2, "ep": 2}, {"model": MIXTRAL}),
    ({"tp": 2, "ep": 2}, {"model": MIXTRAL}),
    (SHARDED, {"memory": {"swap": BLOCKS}}),
    (SHARDED, {"fsdp": {"offload": True}}),
    (SHARDED, {"run": {"deterministic": True}}),
    (SHARDED, {"run": {"accumulate": 2}}),
    (SHARDED, {"optimizer": {"name": "muon"}}),
]
OF_ROWS: list[tuple[dict[str, int], dict[str, Any]]] = [
    (SHARDED, {"memory": {"homes": {"model.layers.*": "host"}}}),
    (SHARDED, {"memory": {"homes": {"model.layers.*": "host"}}, "model": MIXTRAL, "precision": {"experts": "mxfp8"}}),
]


def verified(linear: str, mesh: dict[str, int], sections: dict[str, Any]) -> None:
    precision = {"linear": linear, "kernels": "emulated", **sections.get("precision", {})}
    data = {"sequence_length": 32, "batch_size": 12}
    text = {"model": LLAMA, "mesh": mesh, "data": data, **sections, "precision": precision}
    result = verify(ParallelPlan.from_dict(text))
    assert result.passed, (linear, mesh, sections, result.largest, result.first)
    assert any(f"{linear} " in note and "multiplied in float64" in note for note in result.notes)


@pytest.mark.parametrize("case", range(len(USUAL)))
@on_ranks(2)
def test_blocks_on_two_ranks(case: int):
    verified("mxfp8", *USUAL[case])


@pytest.mark.thorough
@pytest.mark.parametrize("case", range(len(THOROUGH)))
@on_ranks(2)
def test_blocks_on_two_ranks_with_one_thing_at_a_time(case: int):
    verified("mxfp8", *THOROUGH[case])


@pytest.mark.parametrize("case", range(len(OF_ROWS)))
@on_ranks(2)
def test_rows_on_two_ranks(case: int):
    verified("float8-rowwise", *OF_ROWS[case])


@pytest.mark.parametrize("linear", ["float8-rowwise", "mxfp8"])
@on_ranks(3)
def test_gradients_of_three_ranks_are_cast_as_large_as_they_are(linear: str):
    """Three times a number has other bits, where scales are powers of two."""
    verified(linear, {"dp_shard": 3}, {})


@pytest.mark.thorough
@on_ranks(4)
def test_blocks_on_four_ranks():
    verified("mxfp8", {"dp_shard": 2, "tp": 2}, {"styles": "auto-sequence"})
    verified("mxfp8", {"dp_shard": 2, "pp": 2}, {})
    verified("mxfp8", {"pp": 2, "tp": 2}, {})
    verified("mxfp8", {"cp": 2, "tp": 2}, {"styles": "auto-sequence"})
