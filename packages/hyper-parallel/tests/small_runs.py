"""A small run that trains on a text, and what its files say of it."""

from __future__ import annotations

import json

from hp_plan import ParallelPlan
from hp_platform import get_platform
from hyper_parallel.reports.output import prepare_folder
from hyper_parallel.worker import train

TABLES = {
    "model": {
        "config": "Qwen3Config",
        "overrides": {
            "vocab_size": 256,
            "hidden_size": 16,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    },
    "fsdp": {"groups": ["model.layers.*"]},
    "data": {"sequence_length": 8, "batch_size": 4},
    "run": {"steps": 3, "grad_clip": 1.0, "dtype": "float64"},
}
EXPERTS = {
    "config": "Qwen3MoeConfig",
    "overrides": {
        **TABLES["model"]["overrides"],
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "experts_implementation": "grouped_linear",  # torch's own has no float64
    },
}
DROPOUT = {
    "config": "GPT2Config",
    "overrides": {"vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "resid_pdrop": 0.5},
}
SECTIONS = "precision validation profile experts metrics monitor memory compile pipeline sdc recovery".split()
# Keys of `[run]` that tests change.
OF_RUN = ("seed", "dtype", "deterministic", "accumulate", "checkpoint_layout", "keep", "keep_best")


def run(folder, mesh, steps=3, model=None, *, changed=None, optimizer="adamw", **options):
    text = folder / f"text{get_platform().groups.rank()}"  # no rank empties another's file
    text.write_bytes(b"to be or not to be, " * 20)
    tables = {
        **TABLES,
        "model": model or TABLES["model"],
        "mesh": mesh,
        "optimizer": {"name": optimizer} if isinstance(optimizer, str) else optimizer,
        "data": {**TABLES["data"], "paths": [str(text)]},
    }
    if not set(mesh) & {"dp_shard", "dp_replicate"} and mesh:
        del tables["fsdp"]  # nothing is sharded
    tables["run"] = {**TABLES["run"], "steps": steps, "checkpoint_every": 2}
    if tables["model"]["config"] == "GPT2Config":
        tables["fsdp"] = {}
    if "pp" not in mesh:
        tables["validation"] = {"paths": [str(text)], "every": 2, "batches": 2}
    tables["metrics"] = {"peak_flops": 1e9}
    for name, value in (changed or {}).items():
        if name in SECTIONS:
            tables[name] = value
        else:
            tables["run" if name in OF_RUN else "data"][name] = value
    plan = ParallelPlan.from_dict(tables)
    return train(plan, prepare_folder(folder / "run", name="x", resume="resume" in options), **options)


def losses(folder) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [value for step in map(json.loads, lines) for value in (step["loss"], step["grad_norm"])]


def validations(folder) -> dict[int, float]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {step["step"]: step["validation_loss"] for step in lines if "validation_loss" in step}
