"""Runs of a plan with an adapter: what a checkpoint has, how a run goes on from it, and how it is merged."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hp_checkpoint import save
from hp_checkpoint.extend import Ranks
from hp_plan import ParallelPlan, build_model, lint
from hp_plan.extend import override
from hp_testing import on_ranks
from hyper_parallel.commands import checkpoints
from hyper_parallel.data import DataError
from hyper_parallel.training.resuming import check_resume
from hyper_parallel.worker import train

pytestmark = pytest.mark.framework("torch")  # adapters are peft's
MODEL: dict[str, Any] = {
    "config": "LlamaConfig",
    "overrides": {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
EXPERTS = {"config": "Qwen3MoeConfig", "overrides": {**MODEL["overrides"], **SIZES, "head_dim": 4}}
EAGER = {"experts_implementation": "eager"}  # grouped_mm has no float64


def plan_of(place: Path, mesh: dict[str, int], steps: int, base: dict[str, Any]) -> ParallelPlan:
    return ParallelPlan.from_dict(
        {
            "model": {"path": str(place / "model"), "overrides": EAGER if base == EXPERTS else {}},
            "adapter": {"kind": "lora", "rank": 2},
            "mesh": mesh,
            "data": {"paths": [str(place / "text")], "sequence_length": 8, "batch_size": 4, "tokenizer": "bytes"},
            "optimizer": {"lr": 0.05},
            "run": {"steps": steps, "dtype": "float64", "checkpoint_every": 2},
            **({"fsdp": {"groups": ["model.layers.*"]}} if "dp_shard" in mesh else {}),
        }
    )


@on_ranks(2)
@pytest.mark.parametrize(
    "base", [MODEL, pytest.param(EXPERTS, marks=pytest.mark.thorough)], ids=lambda base: base["config"]
)
def test_a_run_goes_on_from_its_adapter_on_another_mesh_and_is_merged(tmp_path, base):
    if torch.distributed.get_rank() == 0:
        build_model(ParallelPlan.from_dict({"model": base, "run": {"dtype": "float64"}})).save_pretrained(
            tmp_path / "model"
        )
        (tmp_path / "text").write_bytes(b"to be or not to be, " * 20)
    Ranks().gather(b" ")
    mesh = {"dp_shard": 2, **({"ep": 2} if base == EXPERTS else {})}
    whole = train(plan_of(tmp_path, mesh, 4, base), tmp_path / "whole")
    train(plan_of(tmp_path, mesh, 4, base), tmp_path / "parts", until=2)
    parts = train(plan_of(tmp_path, {"tp": 2}, 4, base), tmp_path / "parts", resume="auto")
    if whole is None or parts is None:
        return
    assert whole.last_loss == pytest.approx(parts.last_loss, abs=1e-6)
    folder = Path(parts.checkpoint)
    names = {file.name for file in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} < names
    assert not names & {"model.safetensors", "config.json"}, "the model is in a folder of its own"
    own, other = (load_file(Path(run.checkpoint) / "adapter_model.safetensors") for run in (parts, whole))
    assert own.keys() == other.keys() and all("lora_" in name for name in own)
    for name, value in own.items():
        torch.testing.assert_close(value, other[name], atol=1e-9, rtol=1e-9)
    states = json.loads((folder / "manifest.json").read_text())["parts"]["optimizer"]
    assert all("lora_" in name for name in states), "of the adapter alone"
    tables = plan_of(tmp_path, {}, 4, base).to_dict()
    other = ParallelPlan.from_dict({**tables, "run": {**tables["run"], "seed": 5}})
    with pytest.raises(DataError) as refused:
        check_resume(other, tmp_path / "parts")
    way = str(refused.value).split("elsewhere with --set ")[1]
    assert way == f"adapter.weights={folder}"
    assert lint(override(other.to_dict(), [way])) == ()
    result = CliRunner().invoke(checkpoints.app, ["merge", str(tmp_path / "parts"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    tokens = torch.arange(12)[None]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)  # peft's own
        models = [
            AutoModelForCausalLM.from_pretrained(place, **(EAGER if base == EXPERTS else {}))
            for place in (tmp_path / "merged", folder, tmp_path / "model")
        ]
    merged, adapted, base = (model.double()(tokens).logits for model in models)
    torch.testing.assert_close(merged, adapted, atol=1e-6, rtol=1e-6)
    assert (merged - base).abs().max() > 0.01
    nameless = shutil.copytree(folder, tmp_path / "nameless")
    config = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    command = ["merge", str(nameless), str(tmp_path / "named")]
    assert "name it by --base" in " ".join(CliRunner().invoke(checkpoints.app, command).output.split())
    assert CliRunner().invoke(checkpoints.app, [*command, "--base", str(tmp_path / "model")]).exit_code == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("named", "merged"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    shards = tmp_path / "shards"
    save({"adapter_model": own}, checkpoint_id=shards, no_dist=True, layout="shards")
    shutil.copy(folder / "adapter_config.json", shards)
    refused = CliRunner().invoke(checkpoints.app, ["merge", str(shards), str(tmp_path / "again")])
    assert refused.exit_code == 1 and "has files of each rank; write them as one" in refused.output
    command = refused.output.split("hyper-parallel checkpoint ")[1].split()
    for each in (
        [str(tmp_path / "joined") if word == "TARGET" else word for word in command],
        ["merge", str(tmp_path / "joined"), str(tmp_path / "again")],
    ):
        assert CliRunner().invoke(checkpoints.app, each).exit_code == 0, each
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(again[name], value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (None, [], "has no adapter_config.json: it is not of a plan with [adapter]"),
        ({"base_model_name_or_path": None}, [], "names no folder of a model; name it by --base"),
        ({"base_model_name_or_path": "gone"}, [], "gone, the folder of the adapter's model, has no config.json"),
        ({}, ["--base", "gone"], "gone, the folder of the adapter's model, has no config.json"),
    ],
)
def test_what_can_not_be_merged(tmp_path, config, options, message):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(checkpoints.app, ["merge", str(tmp_path), str(tmp_path / "new"), *options])
    assert result.exit_code == 1 and message in " ".join((result.output + (result.stderr or "")).split())
