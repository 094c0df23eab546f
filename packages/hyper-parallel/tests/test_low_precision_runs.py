"""Runs whose products are in eight bits."""

from __future__ import annotations

import math

import pytest
from small_runs import losses, run

from hp_testing import run_ranks

pytest.importorskip("torchao", reason="needs torchao: nox -s low_precision")

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
LLAMA = {"config": "LlamaConfig", "overrides": {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}}
EIGHT_BITS = {"linear": "float8-tensorwise", "kernels": "emulated"}


def train(folder, mesh, **options):
    precision = {**EIGHT_BITS, **({"all_gather": "float8"} if "dp_shard" in mesh else {})}
    changed = {"precision": precision, "dtype": "float32", "sequence_length": 32, "batch_size": 4}
    run_ranks(math.prod(mesh.values()), run, folder, mesh, 4, LLAMA, changed=changed, **options)


@pytest.mark.parametrize(
    "meshes", [({"dp_shard": 2}, {}), ({}, {"dp_shard": 2}), ({"tp": 2}, {"dp_shard": 2})], ids=str
)
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, meshes):
    """A checkpoint has the weights, not their bytes and scales, which belong to a layout."""
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    train(tmp_path / "whole", {})
    for mesh, options in zip(meshes, ({"until": 2}, {"resume": "auto"}), strict=True):
        train(tmp_path / "parts", mesh, **options)
    parts, whole = losses(tmp_path / "parts"), losses(tmp_path / "whole")
    assert len(parts) == 2 * 4 and parts[::2] == pytest.approx(whole[::2], rel=5e-4)
    assert parts[1::2] == pytest.approx(whole[1::2], rel=1e-2)  # norms of gradients, whose numbers have 3 bits
