"""Memory and time of giving each of 4 ranks its part of a model: `build_parallel_model` against `apply(build_model)`.

python packages/hp-plan/benchmarks/bench_models.py [--mib 256] [--ranks 4]

Each rank's peak is that of its resident memory less what it had before, the libraries imported and a small model built.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("folder, whole", "folder, shards", "drawn, whole", "drawn, shards")


def tables(mib: int, ranks: int, model: dict[str, Any]) -> dict[str, Any]:
    """Make a plan of a Llama of so many MiB in float32."""
    layers = max(1, mib // 16)  # 16 MiB a layer: 4 x 512 x 512 and 3 x 512 x 2048, and norms
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512, "intermediate_size": 2048}
    overrides = {**heads, "num_hidden_layers": layers, "vocab_size": 256}
    data = {"batch_size": ranks, "sequence_length": 16}
    chosen = {"config": "LlamaConfig", "overrides": overrides} if not model else model
    return {"model": chosen, "mesh": {"dp_shard": ranks}, "data": data}


def peak(*, reset: bool = False) -> int:
    """Return the peak of this process's resident memory, in bytes; Linux alone tells it."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run(rank: int, way: str, folder: str, arguments: argparse.Namespace, store: str, results: Any) -> None:
    """Build the model on a rank, and report its peak and time."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(arguments.ranks), LOCAL_RANK=str(rank), HYPER_PARALLEL_DEVICE="cpu"
    )
    import torch

    from hp_plan import ParallelPlan, apply, build_model, build_parallel_model

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    ways = {"whole": lambda plan: apply(build_model(plan), plan), "shards": build_parallel_model}
    kind, how = way.split(", ")
    ways[how](ParallelPlan.from_dict(tables(16, arguments.ranks, {})))
    model = {"path": folder} if kind == "folder" else {}
    plan = ParallelPlan.from_dict(tables(arguments.mib, arguments.ranks, model))
    before, start = peak(reset=True), time.perf_counter()
    built = ways[how](plan)
    shards = sum(parameter.to_local().nbytes for parameter in built.parameters())
    results.put((rank, peak() - before, time.perf_counter() - start, shards))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        from hp_plan import ParallelPlan, build_model

        built = build_model(ParallelPlan.from_dict(tables(arguments.mib, arguments.ranks, {})))
        size = sum(parameter.nbytes for parameter in built.parameters())
        built.save_pretrained(place)
        del built
        print(f"Llama of {size / 2**20:,.0f} MiB on {arguments.ranks} ranks of dp_shard, CPU")
        for way in WAYS:
            results, store = context.Queue(), str(Path(place) / way.replace(", ", "-"))
            ranks = [
                context.Process(target=run, args=(rank, way, place, arguments, store, results))
                for rank in range(arguments.ranks)
            ]
            for each in ranks:
                each.start()
            found = [results.get() for _ in ranks]
            for each in ranks:
                each.join()
            peaks, seconds, shards = zip(*(each[1:] for each in sorted(found)), strict=True)
            print(
                f"{way:14}  peak of a rank {max(peaks) / 2**20:7,.0f} MiB  (its shards {max(shards) / 2**20:,.0f} MiB)"
                f"  {max(seconds):5.1f} s"
            )


if __name__ == "__main__":
    main()
