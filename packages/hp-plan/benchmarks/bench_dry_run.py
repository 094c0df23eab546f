"""CPU seconds of dry runs of 1,024 ranks: a process for each pipeline stage, which plays the first rank of it.

    python packages/hp-plan/benchmarks/bench_dry_run.py

For each plan: the least and the most of its stages, in CPU seconds and in operators of a step, and the seconds until
all were there. `hyper-parallel dryrun` plays the last rank of each stage as well where shards are uneven, as they are
here. Nothing is measured of the plans themselves.
"""

from __future__ import annotations

import functools
import importlib
import time
from pathlib import Path
from typing import Any

from hp_plan import ParallelPlan
from hp_plan.dry.stages import StagePeers, play_stages
from hp_plan.torch.dry.api import play_rank, stage_of

_PRELOAD = ("hp_plan.torch.dry.api", "torch._dynamo", "transformers.models.llama.modeling_llama")
_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False}
PLANS: dict[str, tuple[dict[str, int], dict[str, int], int]] = {
    "Llama 8B, dp_shard 32 x tp 8 x pp 4": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        {"dp_shard": 32, "tp": 8, "pp": 4},
        8,
    ),
    "Llama 70B, dp_shard 16 x tp 8 x pp 8": (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        {"dp_shard": 16, "tp": 8, "pp": 8},
        16,
    ),
}


def plan_of(sizes: dict[str, int], mesh: dict[str, int], micro_batches: int) -> ParallelPlan:
    """Make a plan of samples of 4,096 tokens, one a micro-batch."""
    tables: dict[str, Any] = {
        "model": {"config": "LlamaConfig", "overrides": {**_LLAMA, **sizes}},
        "mesh": mesh,
        "data": {"sequence_length": 4096, "batch_size": mesh["dp_shard"] * micro_batches},
        "run": {"dtype": "float32"},
        "fsdp": {"param_dtype": "bfloat16"},
        "pipeline": {"schedule": "1f1b", "micro_batches": micro_batches},
        "memory": {"recompute": ["model.layers.*"]},
    }
    return ParallelPlan.from_dict(tables)


def play(plan: ParallelPlan, rank: int, peers: StagePeers) -> tuple[float, int]:
    """Play a rank, and return the CPU seconds of this process and the operators of a step."""
    report = play_rank(plan, rank, False, False, 1.0, "cuda", peers)
    return time.process_time(), report.trace.operations


def main() -> None:
    print("| plan | CPU seconds of a stage | operators of a step | seconds, all |")
    print("| --- | --- | --- | --- |")
    task = importlib.import_module(Path(__file__).stem).play  # a new process knows no function of this script
    for name, arguments in PLANS.items():
        plan, begun = plan_of(*arguments), time.monotonic()
        mesh = plan.mesh
        stages = {stage: (plan, stage * mesh.world_size // mesh.pp) for stage in range(mesh.pp)}
        played = play_stages(task, stages, functools.partial(stage_of, mesh), preload=_PRELOAD)
        seconds, operators = zip(*played.values(), strict=True)
        print(
            f"| {name} | {min(seconds):.1f} to {max(seconds):.1f} | {min(operators):,} to {max(operators):,} |"
            f" {time.monotonic() - begun:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
