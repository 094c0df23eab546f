"""How one rank's host time grows with the number of ranks: CPU milliseconds, medians, and the exponent of the growth.

This process is one rank of a played world: process groups have torch's fake backend, and a collective is played by a
copy on this process's memory, whose CPU time is subtracted. What remains is the library's own: hooks, plans, lists of
a number for each rank, and what ranks agree on as host numbers. The exponent is the slope of log time over log ranks
between the two largest worlds: 0 does not grow, 1 is linear. Each world has a process of its own, so caches are empty.

    python packages/hyper-parallel/benchmarks/bench_growth.py [--ranks 64 1024 8192] [--repeats 7]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import pickle
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hp_checkpoint.errors import Ranks
from hp_checkpoint.layout.state import flatten
from hp_checkpoint.saving import save_plan
from hp_dtensor import DTensor, RaggedShard, Replicate, Shard, init_device_mesh
from hp_dtensor.redistribution.planner import plan
from hp_fsdp import fully_shard
from hp_moe import ExpertParallel, GroupedExperts
from hp_pipeline import PipelineStage, Schedule1F1B, lower
from hp_pipeline.messages.channels import Channel, Message
from hp_pipeline.port import port
from hp_pipeline.running.runner import Runner, Settings
from hp_platform import get_platform
from hp_platform.torch.dry import Copies, played_world
from hp_styles import ColwiseParallel, RowwiseParallel, parallelize_module
from hp_testing import note_figure

LAYERS, HIDDEN, STAGES, MICRO = 12, 64, 64, 8
Rows = dict[str, tuple[int, list[float]]]
"""By title: the ranks that are talked to, and CPU seconds of each repetition."""


class Block(nn.Module):
    """16 parameters, as a transformer's block has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Clock:
    """Measures CPU time, less that of copies that stand for messages.

    Args:
        copies: of the played world.
        repeats: measured runs of each case.
    """

    def __init__(self, copies: Copies, repeats: int) -> None:
        self.copies, self.repeats = copies, repeats
        self.rows: Rows = {}

    def add(self, title: str, peers: int, run: Callable[[], object], *, warm: int = 2, repeats: int = 0) -> None:
        """Measure a case.

        Args:
            title: of the row.
            peers: the number of ranks that one rank talks to, itself among them.
            run: the case.
            warm: runs before, which are not measured.
            repeats: measured runs; 0 is the clock's.
        """
        for _ in range(warm):
            run()
        seconds = []
        for _ in range(repeats or self.repeats):
            gc.collect()
            self.copies.take()
            begin = time.process_time()
            run()
            seconds.append(time.process_time() - begin - self.copies.take()[1])
        self.rows[title] = peers, seconds


def meshes(clock: Clock, ranks: int) -> None:
    names = (f"mesh{number}" for number in itertools.count())
    clock.add("a mesh of one axis", ranks, lambda: init_device_mesh("cpu", (ranks,), (next(names),)), warm=1)

    def three() -> None:
        name = next(names)
        init_device_mesh("cpu", (ranks // 64, 8, 8), (f"{name}.dp", f"{name}.cp", f"{name}.tp"))

    clock.add("a mesh of three axes, ranks / 64 x 8 x 8", ranks // 64, three, warm=1)


def sharded(clock: Clock, ranks: int) -> nn.Module:
    """Measure `fully_shard`, and return a model of it."""
    models = iter([nn.Sequential(*(Block() for _ in range(LAYERS))) for _ in range(4)])

    def wrap() -> nn.Module:
        model = next(models)
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    clock.add("fully_shard: wrapping 12 blocks", ranks, wrap, warm=1, repeats=2)
    model = wrap()
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(1, 8, HIDDEN)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    clock.add("fully_shard: a step, AdamW", ranks, step)
    return model


def tensor_parallel(clock: Clock, ranks: int) -> None:
    tp = ranks // 8
    mesh = init_device_mesh("cpu", (8, tp), ("dp", "tp"))["tp"]
    blocks = [nn.Sequential(nn.Linear(HIDDEN, 4 * tp), nn.GELU(), nn.Linear(4 * tp, HIDDEN)) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    styles = {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()}
    clock.add(
        "tensor parallel: parallelize_module", tp, lambda: parallelize_module(model, mesh, styles), warm=0, repeats=1
    )
    x = torch.randn(8, HIDDEN)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    clock.add("tensor parallel: forward and backward", tp, step)


def pipelined(clock: Clock, ranks: int) -> None:
    """Measure rank 0's stage, whose messages go to and come from the next one's rank; all pipelines agree on a run."""
    mesh = init_device_mesh("cpu", (ranks // STAGES, STAGES), ("dp", "pp"))
    built: list[tuple[Any, Runner]] = []

    def build() -> None:
        stage = PipelineStage(nn.Linear(HIDDEN, HIDDEN), 0, STAGES)
        schedule = Schedule1F1B(stage, MICRO, group=mesh["pp"].get_group(), peers=get_platform().groups.default_group())
        order = lower(schedule.exec_order, schedule.pipeline)
        runner = schedule._runner = Runner(
            schedule.stages, schedule.pipeline, schedule.rank, schedule.group, schedule.peers, order, {}
        )
        runner.ranks.share = stages_alike
        runner.settings = Settings(True, schedule.overlap_p2p, schedule.patience, None, None, schedule.fingerprint)
        runner._bind()
        built.append((schedule, runner))

    clock.add("pipeline of 64: making the schedule", STAGES, build, warm=1, repeats=3)
    schedule, runner = built[-1]
    schedule._kinds = [nn.Linear]
    for (_, _, ahead), channel in runner.channels.items():
        assert isinstance(channel, Channel)
        channel.signature = Message.of(torch.zeros(1, HIDDEN, requires_grad=ahead)).signature()
    x = torch.randn(MICRO, HIDDEN)
    runner.ranks._inputs = [port().describe(x[:1])]
    clock.add("pipeline of 64: a run of 8 micro-batches", ranks, lambda: schedule.run(x))


def stages_alike(payload: bytes) -> list[bytes]:
    """Play what a pipeline's ranks say of their stages: each has one, like this rank's."""
    weights, facts = pickle.loads(payload)
    fact = next(iter(facts.values()))
    return [pickle.dumps((weights, {stage: fact})) for stage in range(STAGES)]


def experts(clock: Clock, ranks: int) -> None:
    """Measure a layer of one expert a rank, of whose tokens each rank sends one to each other."""
    mesh = init_device_mesh("cpu", (ranks,), ("ep",))
    module: Any = GroupedExperts(8, 8, ranks)
    clock.add(
        "experts: parallelize_module",
        ranks,
        lambda: parallelize_module(module, mesh, ExpertParallel()),
        warm=0,
        repeats=1,
    )
    counts = torch.ones(ranks, dtype=torch.int64)
    x = torch.randn(ranks, 8, requires_grad=True)

    def step() -> None:
        module(x, counts).square().mean().backward()
        module.zero_grad()

    clock.add("experts: forward and backward, a row a rank", ranks, step)


def saving(clock: Clock, ranks: int, model: nn.Module) -> None:
    def planned(state: Any) -> Callable[[], object]:
        def run() -> None:
            save_plan._joined.cache_clear()
            save_plan._lengths.cache_clear()
            save_plan.plan_save(state, "folder", 1, Ranks())

        return run

    buffers = flatten(model.state_dict())
    title = f"save: planning {len(buffers.tensors)} tensors"
    clock.add(f"{title} of fully_shard", ranks, planned(buffers), warm=1)
    mesh = init_device_mesh("cpu", (ranks // 64, 8, 8), ("replicate", "shard", "tp"))
    placements, local = (Replicate(), Shard(0), Shard(1)), torch.zeros(8, 8)
    tensors = {
        name: DTensor.from_local(local.clone(), mesh, placements, run_check=False) for _, name in buffers.tensors
    }
    clock.add(f"{title} of HSDP x TP", ranks, planned(flatten(tensors)), warm=1)
    kept = flatten(model.state_dict())
    clock.add("save: planning the same again", ranks, lambda: save_plan.plan_save(kept, "folder", 1, Ranks()))


def redistribution(clock: Clock, ranks: int) -> None:
    mesh, sizes = init_device_mesh("cpu", (ranks,), ("all",)), (ranks * n for n in itertools.count(1))
    grid = (ranks // 8, 8)
    units = tuple(1 + rank % 2 for rank in range(ranks))
    pairs: dict[str, tuple[tuple[int, ...], Any, Any]] = {
        "Shard(0) to Shard(1)": ((ranks,), (Shard(0),), (Shard(1),)),
        "two axes": (grid, (Shard(0), Shard(1)), (Shard(1), Replicate())),
        "ragged to Replicate": ((ranks,), (RaggedShard((0,), units),), (Replicate(),)),
    }
    for name, (mesh_shape, source, target) in pairs.items():

        def new(mesh_shape: Any = mesh_shape, source: Any = source, target: Any = target) -> None:
            plan(source, target, (3 * next(sizes), 8 * ranks), mesh_shape)

        clock.add(f"plan: {name}, new", ranks, new)
    _, source, target = pairs["Shard(0) to Shard(1)"]
    clock.add("plan: the same again", ranks, lambda: plan(source, target, (ranks, ranks), (ranks,)))

    def moved(local: torch.Tensor) -> Callable[[], object]:
        x = DTensor.from_local(local, mesh, source, run_check=False)
        return lambda: x.redistribute(mesh, target)

    fresh = (moved(torch.zeros(1, n * ranks)) for n in itertools.count(1))
    clock.add("redistribute: Shard(0) to Shard(1), new", ranks, lambda: next(fresh)())
    clock.add("redistribute: the same again", ranks, moved(torch.zeros(1, ranks)))


def measure(ranks: int, repeats: int) -> Rows:
    """Measure everything as rank 0 of a world."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with played_world(ranks, 0) as copies:
        clock = Clock(copies, repeats)
        meshes(clock, ranks)
        model = sharded(clock, ranks)
        tensor_parallel(clock, ranks)
        pipelined(clock, ranks)
        experts(clock, ranks)
        saving(clock, ranks, model)
        redistribution(clock, ranks)
    return clock.rows


def in_own_process(ranks: int, repeats: int) -> Rows:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, ranks, repeats).result()


def table(worlds: list[int], measured: list[Rows]) -> Iterator[str]:
    """Write the table, a line at a time."""
    yield (
        f"{'CPU ms of one rank':48}"
        + "".join(f"{ranks:>11,}" for ranks in worlds)
        + f"{'talks to':>10}{'exponent':>10}"
    )
    for title in measured[0]:
        medians = [statistics.median(rows[title][1]) for rows in measured]
        few, many = medians[-2:]
        exponent = math.log(many / few) / math.log(worlds[-1] / worlds[-2])
        note_figure("growth of host time with ranks", title, exponent)
        cells = "".join(f"{1e3 * each:11.2f}" for each in medians)
        yield f"{title:48}{cells}{measured[-1][title][0]:>10,}{exponent:10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 8192], help="multiples of 64, ascending")
    parser.add_argument("--repeats", type=int, default=7, help="measured runs of a case (default: 7)")
    arguments = parser.parse_args()
    measured = [in_own_process(ranks, arguments.repeats) for ranks in arguments.ranks]
    print(*table(arguments.ranks, measured), sep="\n")


if __name__ == "__main__":
    main()
