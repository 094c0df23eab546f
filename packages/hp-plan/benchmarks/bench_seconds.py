"""Seconds of a step that `tune` predicts, against real steps of 24 plans on 2 and 4 ranks of this machine.

python packages/hp-plan/benchmarks/bench_seconds.py [--steps 10] [PLAN ...]

A prediction is what `hp_plan.tuning.seconds.price` makes of a plan's dry run, of its kernels, each timed alone, and of
the table that `probe` measures: nothing is fitted. Beside it stands one whose four rates (kernels, operations, calls
and bytes of collectives) are fitted to the other 23 plans. What is compared are the processor's seconds of the rank
with the most: ranks that share cores wait for each other by the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
from scipy.optimize import nnls
from scipy.stats import kendalltau, spearmanr

from hp_plan import ParallelPlan, dry_run, probe
from hp_plan.torch.timing.kernels import time_kernels
from hp_plan.torch.timing.ranks import on_ranks, time_steps
from hp_plan.tuning.seconds import count_work, price
from hp_plan.tuning.space import MESH

DENSE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
EXPERTS = {
    **DENSE,
    "moe_intermediate_size": 256,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "experts_implementation": "grouped_linear",
}
RECOMPUTE = {"memory": {"recompute": ["model.layers.*"]}}
SEQUENCE = {"styles": "auto-sequence"}


def _staged(schedule: str, micros: int = 4) -> dict[str, Any]:
    return {"pipeline": {"schedule": schedule, "micro_batches": micros}}


PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp 2": ({"dp_shard": 2}, {}),
    "fsdp 2, no reshard": ({"dp_shard": 2}, {"fsdp": {"reshard_after_forward": False}}),
    "fsdp 2, recompute": ({"dp_shard": 2}, RECOMPUTE),
    "fsdp 2, accumulate 2": ({"dp_shard": 2}, {"run": {"accumulate": 2}}),
    "fsdp 2, accumulate 4": ({"dp_shard": 2}, {"run": {"accumulate": 4}}),
    "fsdp 2, muon": ({"dp_shard": 2}, {"optimizer": {"name": "muon"}}),
    "replicas 2": ({"dp_replicate": 2}, {}),
    "tp 2": ({"tp": 2}, {"styles": "auto"}),
    "tp 2, sequence": ({"tp": 2}, SEQUENCE),
    "tp 2, recompute": ({"tp": 2}, {**SEQUENCE, **RECOMPUTE}),
    "cp 2": ({"cp": 2}, {}),
    "pp 2, 1f1b": ({"pp": 2}, _staged("1f1b")),
    "pp 2, zbv": ({"pp": 2}, _staged("zbv")),
    "fsdp 4": ({"dp_shard": 4}, {}),
    "fsdp 4, recompute": ({"dp_shard": 4}, RECOMPUTE),
    "hsdp 2 x 2": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "fsdp 2 x tp 2": ({"dp_shard": 2, "tp": 2}, SEQUENCE),
    "fsdp 2 x cp 2": ({"dp_shard": 2, "cp": 2}, {}),
    "tp 4": ({"tp": 4}, SEQUENCE),
    "pp 2 x fsdp 2": ({"pp": 2, "dp_shard": 2}, _staged("interleaved")),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, _staged("1f1b")),
    "experts, fsdp 2": ({"dp_shard": 2}, {"experts model": True}),
    "experts, ep 2": ({"dp_shard": 2, "ep": 2}, {"experts model": True}),
    "experts, ep 4": ({"dp_shard": 4, "ep": 4}, {"experts model": True}),
}


def plan_of(name: str) -> ParallelPlan:
    """Return a plan by its name: every one of them takes 16 samples of 128 tokens a step."""
    mesh, sections = PLANS[name]
    experts = "experts model" in sections
    model = {"config": "Qwen3MoeConfig" if experts else "LlamaConfig", "overrides": EXPERTS if experts else DENSE}
    tables: dict[str, Any] = {"model": model, "mesh": mesh, "data": {"sequence_length": 128, "batch_size": 16}}
    for section, values in sections.items():
        if section != "experts model":
            tables[section] = values
    tables["run"] = {"grad_clip": 1.0, **tables.get("run", {})}
    return ParallelPlan.from_dict(tables)


def fitted(rows: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Return for each plan the seconds by rates that all others tell, without negative ones."""

    def rates(rows: np.ndarray, taken: np.ndarray) -> np.ndarray:
        return nnls(rows / taken[:, None], np.ones(len(taken)))[0]

    return np.array([rows[i] @ rates(np.delete(rows, i, 0), np.delete(taken, i)) for i in range(len(taken))])


def judged(what: str, names: list[str], guess: np.ndarray, taken: np.ndarray) -> None:
    """Print how well a prediction ranks plans."""
    errors = np.abs(guess / taken - 1)
    worst = int(errors.argmax())
    scale = float(np.median(taken / guess))
    scaled = np.abs(scale * guess / taken - 1)
    of_dense = [i for i, name in enumerate(names) if not name.startswith("experts")]
    picked, best = min(of_dense, key=lambda i: guess[i]), min(of_dense, key=lambda i: taken[i])
    print(
        f"{what}: Spearman {spearmanr(guess, taken)[0]:.3f}, tau {kendalltau(guess, taken)[0]:.3f}, mean error"
        f" {errors.mean():.1%} ({scaled.mean():.1%} times {scale:.2f}), worst {errors[worst]:.0%} ({names[worst]});"
        f" of the dense plans it picks {names[picked]}, {taken[picked] / taken[best] - 1:.1%} off {names[best]}"
    )


def main() -> None:
    """Predict and run each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("plans", nargs="*", metavar="PLAN")
    chosen = parser.parse_args()
    machine = probe(2)
    print(machine.described)
    kernels: dict[str, float] = {}
    rows, guesses, taken, names = [], [], [], [each for each in PLANS if not chosen.plans or each in chosen.plans]
    for name in names:
        plan = plan_of(name)
        traces = [each.trace for each in dry_run(plan, kernels=True).ranks]
        new = sorted({key for each in traces for key in each.kernels} - kernels.keys())
        kernels |= on_ranks(time_kernels, 1, new, 1)[0]
        mesh = {axis: getattr(plan.mesh, axis) for axis in MESH}
        ranks = []
        for trace in traces:
            work = count_work(trace, kernels)
            alone = price(work, machine, mesh, dtype="float32", overlapped=False).one()
            calls = sum(count.calls for count in trace.collectives.values())
            sent = sum(count.bytes for count in trace.collectives.values())
            timed = sum(value for key, value in work.items() if key[0] == "measured")
            ranks.append((alone.total, timed, trace.operations, calls, sent))
        seconds = time_steps(plan, chosen.steps)
        guess, *row = max(ranks)
        guesses.append(guess)
        rows.append(row)
        taken.append(seconds.cpu)
        print(
            f"{name:22} predicted {guess * 1e3:7.1f} ms, CPU {seconds.cpu * 1e3:7.1f} ms, clock"
            f" {seconds.clock * 1e3:7.1f} ms, kernels {row[0] * 1e3:6.1f} ms, {row[1]:5.0f} operations",
            flush=True,
        )
    took = np.array(taken)
    judged("not fitted", names, np.array(guesses), took)
    if len(names) > 5:
        judged("fitted to the others", names, fitted(np.array(rows), took), took)
    print(json.dumps({"plans": names, "cpu": taken, "predicted": guesses}), file=sys.stderr)


if __name__ == "__main__":
    main()
