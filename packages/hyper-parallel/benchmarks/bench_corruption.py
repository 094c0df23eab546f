"""What `[sdc]` costs: a step with it beside a step without, in turns, on ranks of this machine.

    torchrun --nproc-per-node 3 packages/hyper-parallel/benchmarks/bench_corruption.py [ROUNDS]

A round takes a step of each kind in another order; printed are medians over rounds of the ratio of CPU seconds, those
of rank 0, to those of the step without it in the same round. `replay` is a step whose samples are computed twice; every
200 steps it adds a 200th of what it costs beyond one. Each kind's own trainer is built once.
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
from hp_checkpoint.extend import Ranks
from hp_plan import ParallelPlan
from hp_plan.extend import data_parallel_rows
from hp_platform import get_platform, manual_seed
from hyper_parallel.data import Rows
from hyper_parallel.torch.trainer import Trainer
from hyper_parallel.training.sentinel import Sentinel

KINDS = {"off": {}, "replicas": {"replicas": True}, "replay": {"replay_every": 1}, "off again": {}}


def tables(ranks: int) -> dict:
    overrides = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
    return {
        "model": {"config": "Qwen3Config", "overrides": {**overrides, **heads}},
        "mesh": {"dp_replicate": ranks},
        "data": {"sequence_length": 128, "batch_size": 4 * ranks},
        "run": {"grad_clip": 1.0},
    }


def main(rounds: int) -> None:
    hp_platform.init_process_group()
    groups, drawn = get_platform().groups, random.Random(0)
    plans = {kind: ParallelPlan.from_dict({**tables(groups.size()), "sdc": own}) for kind, own in KINDS.items()}
    trainers = {kind: Trainer(plan) for kind, plan in plans.items()}
    own = data_parallel_rows(plans["off"])
    tokens = np.random.default_rng(0).integers(0, 256, (plans["off"].data.batch_size, 128))
    positions = np.tile(np.arange(128), (len(tokens), 1))
    batch = Rows(tokens, tokens, positions, np.full(len(tokens), 128))
    count = own.stop - own.start

    def rows_of(part: int) -> Rows:
        return batch[part * count : (part + 1) * count]

    folder = Path(tempfile.mkdtemp())
    sentinels = {
        kind: Sentinel(plans[kind], trainer, Ranks(), folder, rows_of=rows_of) for kind, trainer in trainers.items()
    }

    def step(kind: str, number: int) -> float:
        get_platform().collectives.barrier()
        begun = time.process_time()
        sentinels[kind].gradients(number, batch[own], lambda: manual_seed(number))
        trainers[kind].update()
        sentinels[kind].compare(number)
        return time.process_time() - begun

    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(1, rounds + 3):
        order = list(KINDS)
        drawn.shuffle(order)
        for kind in order:
            took = step(kind, number)
            if number > 2:
                seconds[kind].append(took)
    if groups.rank() == 0:
        base = seconds["off"]
        print(f"{rounds} rounds, {groups.size()} ranks, step {statistics.median(base) * 1e3:.1f} ms of CPU")
        for kind, own_seconds in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(own_seconds, base, strict=True))
            print(f"{kind:12} {100 * (ratio - 1):+.1f}%" + (f" ({ratio:.2f} steps)" if kind == "replay" else ""))
    hp_platform.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
