"""What the trainer adds to a step: a model that does nothing, all metrics, metrics.jsonl, a sink and a reporter.

python packages/hyper-parallel/benchmarks/bench_trainer.py [--steps N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hp_platform
from hp_checkpoint import Checkpointer
from hp_pipeline.extend import Operations
from hp_plan import ParallelPlan
from hyper_parallel.reports import sinks
from hyper_parallel.reports.display import JsonReporter
from hyper_parallel.torch import trainer
from hyper_parallel.worker import train

PARTS = 10


class NoOp:
    """A trainer whose step computes nothing."""

    lr, name, size, operations = 1e-3, "NoOp", 1, Operations(1.0, {None: 1.0})

    def __init__(self, plan: ParallelPlan) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self._zero, self.times = torch.zeros(()), []

    def gradients(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Note when."""
        TIMES.append((time.perf_counter(), time.process_time(), time.thread_time()))
        return self._zero, self._zero

    def update(self) -> None:
        """Change nothing."""

    def experts(self, *, loads: bool = True) -> None:
        """Have none."""


class Kept:
    """A sink that takes what it is given."""

    def __init__(self, folder: Path, *, after: int) -> None: ...

    def write(self, step: int, metrics: Any) -> None: ...

    def text(self, name: str, value: str) -> None: ...

    def close(self) -> None: ...


TIMES: list[tuple[float, float, float]] = []


def main(steps: int) -> None:
    """Print the median part's microseconds of a step."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_RANK="0")
    torch.set_num_threads(1)
    trainer.Trainer = NoOp
    sinks.TensorBoard = Kept
    Checkpointer.save = lambda *_, **__: None
    trainer.write_sample = lambda *_: None
    tables = {
        "model": {"function": "none:none"},
        "data": {"batch_size": 8, "sequence_length": 128},
        "run": {"steps": steps},
        "metrics": {"sinks": ["tensorboard"], "peak_flops": 1e12},
    }
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        hp_platform.init_process_group()
        stack.callback(hp_platform.destroy_process_group)
        stream = stack.enter_context(open(os.devnull, "w"))
        train(ParallelPlan.from_dict(tables), Path(name), reporter=JsonReporter(stream))
        lines = (Path(name) / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == steps and "mfu" in lines[-1]
    size = steps // PARTS
    for what, column in (("wall clock", 0), ("CPU, all threads", 1), ("CPU, main thread", 2)):
        times = [each[column] for each in TIMES]
        parts = [(times[at + size - 1] - times[at]) / (size - 1) for at in range(0, size * PARTS, size)]
        print(f"{what}: {1e6 * statistics.median(parts):.0f} us a step, least {1e6 * min(parts):.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    main(parser.parse_args().steps)
