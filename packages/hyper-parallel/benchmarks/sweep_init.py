"""Plans that `hyper-parallel init` writes, for 12 model families: each is trained 20 steps on 4 ranks.

python packages/hyper-parallel/benchmarks/sweep_init.py [--steps 20] [FAMILY ...]

Fails where the mean loss of the last three steps isn't less than that of the first three.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
# Configuration class -> its small sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": _GROUPED,
    "MistralConfig": {**_GROUPED, "head_dim": 8},
    "Qwen2Config": _GROUPED,
    "Qwen3Config": {**_GROUPED, "head_dim": 8},
    "GemmaConfig": {**_GROUPED, "head_dim": 8},
    "Gemma2Config": {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Phi3Config": {**_GROUPED, **_SPECIAL},
    "Olmo2Config": {**_GROUPED, **_SPECIAL},
    "GPTNeoXConfig": _SIZES,
    "GPT2Config": {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **_SPECIAL},
    "MixtralConfig": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {**_GROUPED, **_EXPERTS, "head_dim": 8},
}


def assignments(family: str) -> list[str]:
    """Return the sizes as `init --set` takes them."""
    return [f"model.overrides.{key}={value}" for key, value in FAMILIES[family].items()]


def run(rank: int, families: list[str], steps: int, place: str, results: Any) -> None:
    """Train all plans on a rank; rank 0 reports the losses."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank), MASTER_ADDR="localhost")
    import torch

    from hp_plan import ParallelPlan
    from hyper_parallel.reports.output import prepare_folder
    from hyper_parallel.worker import train

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=4)
    for family in families:
        folder = Path(place) / family
        if rank == 0:
            prepare_folder(folder, name=family)
        torch.distributed.barrier()
        plan = ParallelPlan.from_toml(Path(place) / f"{family}.toml")
        train(plan, folder)
        if rank == 0:
            results.put((family, (folder / "metrics.jsonl").read_text(encoding="utf-8")))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> int:
    """Print a line a family; return the exit status."""
    import json

    from hp_plan import dry_run
    from hyper_parallel.commands.proposing import plan_text, proposal_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HYPER_PARALLEL_DEVICE="cpu")
    context, faults = multiprocessing.get_context("spawn"), 0
    with tempfile.TemporaryDirectory() as place:
        for family in arguments.families:
            more = [f"run.steps={arguments.steps}", "data.max_bytes=200000"]
            proposal = proposal_of(family, 4, play=dry_run, assignments=[*assignments(family), *more])
            (Path(place) / f"{family}.toml").write_text(plan_text(proposal), encoding="utf-8")
        results = context.Queue()
        work = (arguments.families, arguments.steps, place, results)
        ranks = [context.Process(target=run, args=(rank, *work)) for rank in range(4)]
        for each in ranks:
            each.start()
        for _ in arguments.families:
            while results.empty() and all(each.is_alive() for each in ranks):
                time.sleep(0.1)
            if results.empty():
                faults += 1  # a rank has ended, with its traceback
                break
            family, lines = results.get()
            losses = [json.loads(line)["loss"] for line in lines.splitlines()]
            first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
            fault = not last < first or len(losses) != arguments.steps
            faults += fault
            print(f"{'FAULT ' if fault else ''}{family}: loss {first:.3f} to {last:.3f}", flush=True)
        for each in ranks:
            each.join()
            faults += each.exitcode != 0
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
