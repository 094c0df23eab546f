"""A thousand steps of a pipeline: tensors, the garbage collector's work and the process's memory stay flat.

Two ranks take turns with 1F1B, ZBV with checkpointed layers, and interleaved pairs that meet; in between come runs
without backward, stages that raise and batches of another size.

    python packages/hp-pipeline/benchmarks/soak_pipeline.py [--steps 1000]
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_pipeline import (
    CommComputeOverlap,
    PipelineError,
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBV,
    placed,
    schedules,
)
from hp_testing import run_ranks

WIDTH, MICRO = 32, 4


class Part(nn.Module):
    """A layer with an exchange of one rank, which passes its input on; the last returns the loss."""

    def __init__(self, stage: int, count: int, again: bool, overlap: CommComputeOverlap | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.again, self.last, self.failing = again, stage == count - 1, False
        self.exchanges: list[Any] = [lambda x: x + 0] * 2
        if overlap is not None:
            self.exchanges = [
                overlap.wrap_dispatch(self.exchanges[0], stage=stage),
                overlap.wrap_combine(self.exchanges[1], True, stage=stage),
            ]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.failing:
            raise ArithmeticError("too hot")
        y = self.exchanges[0](self.norm(x))
        return x + self.exchanges[1](self.down(torch.tanh(self.up(y))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.compute, x, use_reentrant=False) if self.again else self.compute(x)
        return x.square().mean() if self.last else x


def build(kind: Any, again: bool = False, pairs: bool = False) -> tuple[nn.ModuleList, list[PipelineSchedule]]:
    """Make a schedule, and one that only goes forwards, of the same stages."""
    placement, overlap = placed(kind.shape, 2), CommComputeOverlap() if pairs else None
    own, count = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank()], len(placement)
    parts = nn.ModuleList(Part(stage, count, again, overlap) for stage in own)
    places = [(part, stage, count) for part, stage in zip(parts, own, strict=True)]
    options: dict[str, Any] = {"overlap_b_f": True, "overlap": overlap} if pairs else {}
    train = kind([PipelineStage(*place) for place in places], MICRO, **options)
    stages = [PipelineStage(*place, has_backward=False) for place in places]
    return parts, [train, PipelineSchedule(stages, MICRO, placement=placement, order=schedules.gpipe)]


def counts() -> tuple[int, int]:
    """Count tensors and other objects that the garbage collector knows."""
    objects = gc.get_objects()
    return sum(isinstance(each, torch.Tensor) for each in objects), len(objects)


def resident() -> int:
    """Return the process's memory in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def soak(steps: int) -> list[tuple[int, int, int, int]]:
    """Train on one rank; return (step, tensors, objects, MiB) after a fifth of the steps and in the end."""
    runs = [build(Schedule1F1B), build(ScheduleZBV, again=True), build(ScheduleInterleaved1F1B, pairs=True)]
    optimizer = torch.optim.SGD([each for parts, _ in runs for each in parts.parameters()], lr=1e-3)
    rows = []
    gc.collect()
    gc.disable()
    for step in range(steps):
        parts, (train, forwards) = runs[step % 3]
        x = torch.randn(MICRO * (2 + step // 3 % 2), WIDTH)
        parts[0].failing = step % 50 == 7 and dist.get_rank() == 1
        try:
            train.run(x)
        except PipelineError:
            optimizer.zero_grad()
        parts[0].failing = False
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 3:
            forwards.run(x)
        if step in (steps // 150 * 30, (steps - 1) // 30 * 30):
            rows.append((step, *counts(), resident()))
    found = gc.collect()
    gc.enable()
    print(f"rank {dist.get_rank()}: the garbage collector, off meanwhile, finds {found} objects", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    for rank, rows in enumerate(run_ranks(2, soak, steps, timeout=1000.0)):
        for step, tensors, objects, memory in rows:
            print(f"rank {rank}, step {step}: {tensors} tensors, {objects} objects, {memory} MiB")
        (_, before, _, _), (_, after, _, _) = rows
        assert before == after, f"rank {rank}: tensors grew from {before} to {after}"
    print(f"flat over {steps} steps")


if __name__ == "__main__":
    main()
