"""Plans to play without memory, and the same steps on real ranks under the same ledger."""

from __future__ import annotations

from typing import Any

import torch

from hp_moe.extend import balanced, forced_routes
from hp_plan import ParallelPlan
from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.dry.playing import Played, without_collector
from hp_plan.torch.dry.reading import report_of
from hp_platform import get_platform

_DENSE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    **_DENSE,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "grouped_linear",
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _DENSE),
    "qwen3": ("Qwen3Config", {**_DENSE, "head_dim": 16, "tie_word_embeddings": True}),
    "experts": ("Qwen3MoeConfig", _EXPERTS),
}
_BLOCKS = ["model.layers.*"]
_HOMES = {"homes": {"model.layers.*": "host"}}


def plan_tables(mesh: dict[str, Any], family: str = "llama", **sections: Any) -> dict[str, Any]:
    config, overrides = _MODELS[family]
    tables: dict[str, Any] = {
        "model": {"config": config, "overrides": dict(overrides)},
        "mesh": mesh,
        "data": {"sequence_length": 32, "batch_size": 8},
        "run": {"dtype": "float32", "grad_clip": 1.0},
    }
    for name, value in sections.items():
        tables[name] = {**tables.get(name, {}), **value} if isinstance(value, dict) else value
    return tables


USUAL: dict[str, dict[str, Any]] = {
    "fsdp": plan_tables({"dp_shard": 2}),
    "tp": plan_tables({"tp": 2}, styles="auto-sequence"),
    "cp": plan_tables({"cp": 2}),
    "ep": plan_tables({"dp_shard": 2, "ep": 2}, "experts"),
    "pp": plan_tables({"pp": 2}, pipeline={"schedule": "1f1b", "micro_batches": 4}),
    "muon, recompute, bfloat16": plan_tables(
        {"dp_shard": 2}, optimizer={"name": "muon"}, memory={"recompute": _BLOCKS}, fsdp={"param_dtype": "bfloat16"}
    ),
}
THOROUGH: dict[str, dict[str, Any]] = {
    "hsdp": plan_tables({"dp_replicate": 2, "dp_shard": 2}),
    "fsdp of 4": plan_tables({"dp_shard": 4}),
    "replicas": plan_tables({"dp_replicate": 2}),
    "tp of 2, whole": plan_tables({"tp": 2}, styles="auto"),
    "fsdp x tp": plan_tables({"dp_shard": 2, "tp": 2}),
    "fsdp x tp, sequence": plan_tables({"dp_shard": 2, "tp": 2}, styles="auto-sequence"),
    "fsdp x cp": plan_tables({"dp_shard": 2, "cp": 2}),
    "no reshard": plan_tables({"dp_shard": 2}, fsdp={"reshard_after_forward": False}),
    "bfloat16": plan_tables({"dp_shard": 2}, fsdp={"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
    "weights in bfloat16": plan_tables({"dp_shard": 2}, run={"dtype": "bfloat16"}),
    "recompute": plan_tables({"dp_shard": 2}, memory={"recompute": _BLOCKS}),
    "recompute under tp": plan_tables({"tp": 2}, memory={"recompute": _BLOCKS}),
    "accumulate": plan_tables({"dp_shard": 2}, run={"accumulate": 2}),
    "accumulate, no reshard": plan_tables(
        {"dp_shard": 2}, run={"accumulate": 4}, fsdp={"reshard_after_forward": False}
    ),
    "deterministic": plan_tables({"dp_shard": 2}, run={"deterministic": True}),
    "sgd": plan_tables({"dp_shard": 2}, optimizer={"name": "sgd", "momentum": 0.9}),
    "muon": plan_tables({"dp_shard": 2}, optimizer={"name": "muon"}),
    "muon under tp": plan_tables({"tp": 2}, optimizer={"name": "muon"}),
    "muon, fsdp x tp": plan_tables({"dp_shard": 2, "tp": 2}, optimizer={"name": "muon"}),
    "no clipping": plan_tables({"dp_shard": 2}, run={"grad_clip": None}),
    "tied": plan_tables({"dp_shard": 2}, "qwen3"),
    "tied under tp": plan_tables({"tp": 2}, "qwen3"),
    "tied, fsdp x tp": plan_tables({"dp_shard": 2, "tp": 2}, "qwen3"),
    "tied under cp": plan_tables({"cp": 2}, "qwen3"),
    "tied, recompute": plan_tables({"dp_shard": 2}, "qwen3", memory={"recompute": _BLOCKS}),
    "experts under fsdp": plan_tables({"dp_shard": 2}, "experts"),
    "experts under fsdp, recompute": plan_tables({"dp_shard": 2}, "experts", memory={"recompute": _BLOCKS}),
    "ep x tp": plan_tables({"dp_shard": 2, "ep": 2, "tp": 2}, "experts"),
    "ep of 4": plan_tables({"dp_shard": 4, "ep": 4}, "experts"),
    "ep in half of fsdp": plan_tables({"dp_shard": 4, "ep": 2}, "experts"),
    "ep, accumulate": plan_tables({"dp_shard": 2, "ep": 2}, "experts", run={"accumulate": 2}),
    "interleaved, fsdp": plan_tables(
        {"pp": 2, "dp_shard": 2}, pipeline={"schedule": "interleaved", "micro_batches": 4}
    ),
    "zbv": plan_tables({"pp": 2}, pipeline={"schedule": "zbv", "micro_batches": 4}),
    "gpipe": plan_tables({"pp": 2}, pipeline={"schedule": "gpipe", "micro_batches": 4}),
    "pp x tp": plan_tables({"pp": 2, "tp": 2}, pipeline={"schedule": "1f1b", "micro_batches": 4}),
}
"""With USUAL over 40 plans."""
HOST: dict[str, dict[str, Any]] = {
    "swap": plan_tables({"dp_shard": 2}, memory={"swap": _BLOCKS}),
    "offload": plan_tables({"dp_shard": 2}, fsdp={"offload": True}),
    "swap_slices": plan_tables({"dp_shard": 2}, optimizer={"swap_slices": 4}),
    "homes alone": plan_tables({"dp_shard": 1}, memory=_HOMES),
    "homes": plan_tables({"tp": 2}, memory=_HOMES, run={"accumulate": 2}),
}
"""Plans that have something in the host's memory."""
HOST_THOROUGH: dict[str, dict[str, Any]] = {
    "swap under tp": plan_tables({"tp": 2}, memory={"swap": _BLOCKS}),
    "swap, experts": plan_tables({"dp_shard": 2, "ep": 2}, "experts", memory={"swap": _BLOCKS}),
    "swap, bfloat16": plan_tables({"dp_shard": 2}, memory={"swap": _BLOCKS}, fsdp={"param_dtype": "bfloat16"}),
    "swap and recompute": plan_tables(
        {"dp_shard": 2}, memory={"swap": ["model.layers.0", "model.layers.1"], "recompute": ["model.layers.[23]"]}
    ),
    "swap, accumulate": plan_tables({"dp_shard": 2}, memory={"swap": _BLOCKS}, run={"accumulate": 2}),
    "offload, bfloat16": plan_tables({"dp_shard": 2}, fsdp={"offload": True, "param_dtype": "bfloat16"}),
    "offload, recompute": plan_tables({"dp_shard": 2}, fsdp={"offload": True}, memory={"recompute": _BLOCKS}),
    "offload, tp": plan_tables({"dp_shard": 2, "tp": 2}, fsdp={"offload": True}),
    "homes alone, a cache": plan_tables(
        {"dp_shard": 1},
        "qwen3",
        memory={"homes": dict.fromkeys(_BLOCKS, "host"), "cache": "1MiB", "recompute": _BLOCKS},
    ),
    "homes, sharded": plan_tables({"dp_shard": 2}, memory={"homes": {"model.layers.[01]": "host"}}),
    "homes, replicated": plan_tables({"dp_replicate": 2}, memory=_HOMES),
    "swap_slices, muon": plan_tables({"dp_shard": 2}, optimizer={"name": "muon", "swap_slices": 4}),
    "swap_slices, swap": plan_tables({"dp_shard": 2}, optimizer={"swap_slices": 4}, memory={"swap": _BLOCKS}),
}
EIGHT_BITS = plan_tables({"dp_shard": 2}, optimizer={"name": "adamw8bit"})
"""A plan whose optimizer torch compiles, which takes a C++ compiler, and its time."""


def measured(tables: dict[str, Any]) -> dict[str, Any]:
    """Take a plan's first steps on this rank, and return what the ledger read of one after the second.

    gloo's threads let go of what they sent a moment after the others have it, which makes some steps' peaks higher. The
    step with the least is returned.

    Args:
        tables: of the plan.
    """
    plan, rank = ParallelPlan.from_dict(tables), get_platform().groups.rank()
    with without_collector(), forced_routes(balanced):
        played = Played(plan, Ledger(("cpu",)), torch.device("cpu"))
        reports = []
        for _ in range(8):
            played.step()
            reports.append(report_of(played, rank))
    return told(min(reports[2:], key=lambda each: (each.peak.live, each.rest)))


def told(report: Any) -> dict[str, Any]:
    """Return the numbers of a rank that dry and real steps have in common.

    Args:
        report: of the rank.
    """
    counts: dict[str, list[int]] = {}
    for (kind, _, axes), count in report.trace.collectives.items():
        total = counts.setdefault(f"{kind} over {' x '.join(axes)}", [0, 0])
        total[0] += count.calls
        total[1] += count.bytes
    return {
        "peak": report.peak.live,
        "rest": report.rest,
        "host": report.host,
        "flops": report.trace.flops,
        "collectives": counts,
    }
