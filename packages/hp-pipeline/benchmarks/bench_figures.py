"""A split backward beside a plain one and torch's; runs with sleeping stages beside the simulator.

Split: CPU milliseconds of four layers as Llama's, width 128, minima of interleaved rounds. Sleeping: stages that sleep
10 ms on four ranks; the seconds of a step, the least of ten, beside those that `simulate` says.

    python packages/hp-pipeline/benchmarks/bench_figures.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import hp_pipeline
from hp_pipeline import Costs, MetaStepType, Pipeline, PipelineStage, placed, simulate
from hp_pipeline.torch.port import backward, deferring, prepare_split
from hp_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_split_backward import Block

WIDTH, SECONDS, MICRO = 128, 0.01, 8


class Clock:
    """Adds up the least CPU seconds of parts of a round."""

    def __init__(self) -> None:
        self.least: dict[str, float] = {}
        self.last = 0.0

    def start(self) -> None:
        self.last = time.process_time()

    def stop(self, name: str) -> None:
        now = time.process_time()
        self.least[name] = min(self.least.get(name, 1e9), now - self.last)
        self.last = now


def split(rounds: int) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
    own = nn.Sequential(*(Block(WIDTH) for _ in range(4)))
    prepare_split(own)
    x, gradient = torch.randn(4, 64, WIDTH), torch.randn(4, 64, WIDTH)
    clock = Clock()
    for _ in range(rounds):
        leaf = x.clone().requires_grad_()
        clock.start()
        out = model(leaf)
        clock.stop("plain F")
        out.backward(gradient)
        clock.stop("plain B")
        leaf = x.clone().requires_grad_()
        deferred, context = deferring(own)
        clock.start()
        with context:
            out = own(leaf)
        clock.stop("ours F")
        backward(own, [], [out], [gradient], deferred)
        clock.stop("ours I")
        deferred.run()
        clock.stop("ours W")
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        clock.start()
        _, groups = stage_backward_input([out], [gradient], [leaf], model.parameters())
        clock.stop("torch I")
        stage_backward_weight(model.parameters(), groups)
        clock.stop("torch W")
        for each in (model, own):
            each.zero_grad()
    times = clock.least
    print(", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
    print(
        f"split, width {WIDTH}: forward {times['ours F'] / times['plain F']:.2f} of a plain one; both halves"
        f" {(times['ours I'] + times['ours W']) / times['plain B']:.2f} of a plain backward, torch's"
        f" {(times['torch I'] + times['torch W']) / times['plain B']:.2f}"
    )


def asleep(name: str) -> float:
    """Return the least seconds of a step, from the first step's begin to the last one's end on all ranks."""
    kind = getattr(hp_pipeline, name)
    placement = placed(kind.shape, dist.get_world_size())
    own = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank()]
    count = len(placement)
    linears = [nn.Linear(4, 4) for _ in own]

    def stage(place: int) -> Any:
        return (lambda x: linears[place](x).sum()) if own[place] == count - 1 else linears[place]

    schedule = kind([PipelineStage(stage(place), index, count, "cpu") for place, index in enumerate(own)], MICRO)

    def sleeping(step: Any, run: Any) -> None:
        end = time.perf_counter() + SECONDS * (2 if step.step_type is MetaStepType.BACKWARD else 1)
        run()
        time.sleep(max(0.0, end - time.perf_counter()))

    kinds = MetaStepType.FORWARD, MetaStepType.BACKWARD, MetaStepType.BACKWARD_INPUT, MetaStepType.BACKWARD_WEIGHT
    for each in kinds:
        schedule.register_custom_function(each, sleeping)
    least = 1e9
    for _ in range(10):
        dist.barrier()
        begin = time.perf_counter()
        schedule.run(torch.randn(MICRO, 4))
        dist.barrier()
        least = min(least, time.perf_counter() - begin)
    return least


def message() -> float:
    """Return the least seconds of a message between the first two ranks."""
    tensor, least = torch.zeros(4), 1e9
    for _ in range(50):
        dist.barrier()
        begin = time.perf_counter()
        if dist.get_rank() < 2:
            for sender in (0, 1):
                (dist.send if dist.get_rank() == sender else dist.recv)(tensor, 1 - dist.get_rank())
        least = min(least, (time.perf_counter() - begin) / 2)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    split(parser.parse_args().rounds)
    send = max(run_ranks(4, message)[:2])
    print(f"a message takes {send * 1e3:.2f} ms")
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZB1P", "ScheduleZBV"):
        kind = getattr(hp_pipeline, name)
        pipeline = Pipeline(placed(kind.shape, 4), MICRO, cost=Costs(SECONDS, SECONDS, SECONDS, send))
        said = simulate((kind.make or hp_pipeline.schedules.interleaved)(pipeline), pipeline)
        run = max(run_ranks(4, asleep, name))
        print(f"{name}: {run * 1e3:.0f} ms, simulated {said.makespan * 1e3:.0f} ms, {run / said.makespan - 1:+.1%}")


if __name__ == "__main__":
    main()
