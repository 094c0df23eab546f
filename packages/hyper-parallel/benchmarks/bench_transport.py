"""Training steps whose collectives go through shared memory, and through gloo, turn by turn: wall and CPU time.

    python packages/hyper-parallel/benchmarks/bench_transport.py
    python packages/hyper-parallel/benchmarks/bench_transport.py --parts demo --steps 200

"fsdp" is a GPT of 12 layers, hidden 512, under hp_fsdp on 2 ranks; "demo" is examples/qwen3_fsdp_tp.toml on 4, all of
the trainer with it. One step goes one way and the next one the other, in the same processes, so that other work on the
machine takes from both alike. Wall is the median of a step on rank 0, CPU that of all threads of all ranks. The bits
differ: gloo's sums have another order from three ranks on.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hp_fsdp import fully_shard
from hp_plan import ParallelPlan
from hp_platform.extend import set_transport
from hp_testing import run_ranks
from hyper_parallel.torch import trainer
from hyper_parallel.worker import train

ROOT = Path(__file__).parents[3]
WAYS = ("auto", "backend")
SKIPPED = 4
Times = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print("| step | ranks | gloo ms: wall, CPU | shared memory | ratio |\n| --- | --- | --- | --- | --- |")
    for part in options.parts:
        function, ranks = PARTS[part]
        told: list[Times] = run_ranks(ranks, function, options.steps, timeout=3600.0)
        wall = {way: statistics.median(each[0] for each in told[0][way]) * 1e3 for way in WAYS}
        cpu = {way: sum(statistics.mean(each[1] for each in times[way]) for times in told) * 1e3 for way in WAYS}
        gloo, own = (f"{wall[way]:.1f}, {cpu[way]:.1f}" for way in ("backend", "auto"))
        ratio = f"{wall['auto'] / wall['backend']:.2f}, {cpu['auto'] / cpu['backend']:.2f}"
        print(f"| {part} | {ranks} | {gloo} | {own} | {ratio} |", flush=True)


class Clock:
    """Gives each step its way, and measures it."""

    def __init__(self) -> None:
        self.times: Times = {way: [] for way in WAYS}
        self._number, self._begun = 0, (0.0, 0.0)

    def __call__(self) -> None:
        """End a step, and begin the next one."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        now = time.perf_counter(), usage.ru_utime + usage.ru_stime
        if self._number > SKIPPED:
            spent = now[0] - self._begun[0], now[1] - self._begun[1]
            self.times[WAYS[(self._number - 1) % 2]].append(spent)
        set_transport(WAYS[self._number % 2])
        self._number, self._begun = self._number + 1, now


class Block(nn.Module):
    """A GPT-like block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (each(h).unflatten(-1, (-1, 64)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def fsdp(steps: int) -> Times:
    """Train the GPT."""
    torch.set_num_threads(1)
    hidden, clock = 512, Clock()
    model = nn.Sequential(
        nn.Embedding(1024, hidden), *(Block(hidden) for _ in range(12)), nn.Linear(hidden, 1024, bias=False)
    )
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(1024, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps + SKIPPED + 1):
        clock()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    clock()
    return clock.times


def demo(steps: int) -> Times:
    """Train the example's model by the trainer."""
    clock = Clock()

    class Measured(trainer.Trainer):
        def gradients(self, rows: Any) -> Any:
            clock()
            return super().gradients(rows)

    trainer.Trainer = Measured  # type: ignore[misc]
    plan = ParallelPlan.from_toml(ROOT / "examples" / "qwen3_fsdp_tp.toml")
    plan = replace(plan, run=replace(plan.run, steps=steps + SKIPPED + 2))
    with tempfile.TemporaryDirectory() as folder:
        train(plan, Path(folder))
    return clock.times


PARTS: dict[str, tuple[Callable[[int], Times], int]] = {"fsdp": (fsdp, 2), "demo": (demo, 4)}

if __name__ == "__main__":
    main()
