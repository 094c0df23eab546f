"""What `[monitor]` costs: a step with it beside a step without, in turns, on ranks of this machine.

    torchrun --nproc-per-node 2 packages/hyper-parallel/benchmarks/bench_monitor.py [ROUNDS]

A round takes a step of each kind in another order; printed are medians over rounds of the ratio of CPU seconds, those
of rank 0, to those of the step without it in the same round. Each kind's own trainer is built once.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import hp_platform
from hp_plan import ParallelPlan
from hp_plan.extend import ReadingsFile, data_parallel_rows
from hp_platform import get_platform
from hyper_parallel.data import Rows
from hyper_parallel.torch.trainer import Trainer

KINDS = {
    "off": {},
    "gradients: norm, low, high": {"every": 1, "phases": ["loss", "gradient"]},
    "weights: bits": {"every": 1, "phases": ["weight"], "numbers": ["bits"]},
    "modules: bits": {"every": 1, "phases": ["forward", "backward"], "numbers": ["bits"]},
    "modules: bits and norm": {"every": 1, "phases": ["forward", "backward"], "numbers": ["norm", "bits"]},
    "off again": {},
}


def tables(ranks: int) -> dict:
    overrides = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
    return {
        "model": {"config": "Qwen3Config", "overrides": {**overrides, **heads}},
        "mesh": {"dp_shard": ranks},
        "data": {"sequence_length": 128, "batch_size": 4 * ranks},
        "run": {"grad_clip": 1.0},
    }


def main(rounds: int) -> None:
    hp_platform.init_process_group()
    groups = get_platform().groups
    rank, drawn = groups.rank(), random.Random(0)
    folder = Path(tempfile.mkdtemp())
    plans = {kind: ParallelPlan.from_dict({**tables(groups.size()), "monitor": own}) for kind, own in KINDS.items()}
    trainers = {kind: Trainer(plan) for kind, plan in plans.items()}
    files = {}
    for kind, trainer in trainers.items():
        if trainer.capture is not None:
            (folder / kind).mkdir()
            files[kind] = ReadingsFile(folder / kind, rank, trainer.capture.layout(), step=0)
    own = data_parallel_rows(plans["off"])
    tokens = np.random.default_rng(0).integers(0, 256, (plans["off"].data.batch_size, 128))[own]
    rows = Rows(tokens, tokens, np.tile(np.arange(128), (len(tokens), 1)), np.full(len(tokens), 128))
    waiting: dict = {}

    def step(kind: str, number: int) -> float:
        trainer = trainers[kind]
        get_platform().collectives.barrier()
        begun = time.process_time()
        if trainer.capture is not None:
            trainer.capture.begin(number)
        loss, _ = trainer.gradients(rows)
        trainer.update()
        if trainer.capture is not None:
            if kind in waiting:
                files[kind].write(waiting[kind].records(number - 1, files[kind].number))
            waiting[kind] = trainer.capture.take(loss)
        return time.process_time() - begun

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(1, rounds + 3):
        order = list(KINDS)
        drawn.shuffle(order)
        for kind in order:
            took = step(kind, number)
            if number > 2:
                seconds[kind].append(took)
    if rank == 0:
        base = seconds["off"]
        print(f"{rounds} rounds, {groups.size()} ranks, step {statistics.median(base) * 1e3:.1f} ms of CPU")
        for kind, own_seconds in seconds.items():
            ratios = [a / b for a, b in zip(own_seconds, base, strict=True)]
            print(f"{kind:40} {100 * (statistics.median(ratios) - 1):+.1f}%")
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
