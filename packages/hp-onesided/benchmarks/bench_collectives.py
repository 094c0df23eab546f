"""Collectives of ranks on one host through shared memory and through gloo, turn by turn: wall and CPU time.

    python packages/hp-onesided/benchmarks/bench_collectives.py
    python packages/hp-onesided/benchmarks/bench_collectives.py --ranks 4 --kinds all_reduce --sizes 16M --repeats 100

Each line is a collective of float32, or of `--dtype`: gloo's wall time of a call (the median of a rank, the slowest
rank's) and CPU time (of all ranks together), then the ratios to them of the compiled core, of its thread (with
`async_op`), and of the core in Python. A size is the whole tensor's: the output of an all-gather, the input of the
others. The machine may have other work: what takes turns shares it alike, and CPU time hardly notices.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from hp_onesided import core_name, opening
from hp_onesided.opening import open_carrier
from hp_platform import destroy_process_group, get_platform, init_process_group
from hp_platform.communication import carriers

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier")
WAYS = ("gloo", "native", "thread", "python")
UNITS = {"K": 2**10, "M": 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", nargs="+", default=["4K", "256K", "16M"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    sizes = [int(text[:-1]) * UNITS[text[-1]] for text in options.sizes]
    print("| ranks | collective | bytes | gloo ms: wall, CPU | native: wall, CPU | thread | Python |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            cases = [(kind, size) for kind in options.kinds for size in (sizes if kind != "barrier" else sizes[:1])]
            arguments = ranks, str(Path(folder, "store")), cases, options.dtype, options.repeats
            multiprocessing.spawn(work, arguments, nprocs=ranks)


def work(rank: int, ranks: int, path: str, cases: list[tuple[str, int]], dtype: str, repeats: int) -> None:
    """Measure on one rank, and print on the first."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    carriers.ENTRY_POINTS = ""  # each group gets its carrier here
    init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    groups = {way: group_of(way, ranks) for way in WAYS if way != "native" or core_name() == "native"}
    for kind, size in cases:
        calls = {way: call_of(kind, size, way, group, getattr(torch, dtype)) for way, group in groups.items()}
        walls, processor = measure(calls, groups["gloo"], repeats)
        mine = torch.tensor([walls[way] for way in calls], dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        used = torch.tensor([processor[way] for way in calls], dtype=torch.float64)
        dist.all_reduce(used)
        if rank == 0:
            own = {way: (wall, cpu) for way, wall, cpu in zip(calls, mine.tolist(), used.tolist())}
            wall, cpu = own["gloo"]
            told = [f"{own[way][0] / wall:.2f}, {own[way][1] / cpu:.2f}" if way in own else "-" for way in WAYS[1:]]
            print(
                f"| {ranks} | {kind} | {size if kind != 'barrier' else 0} | {wall * 1e3:.3f}, {cpu * 1e3:.3f} |"
                f" {' | '.join(told)} |",
                flush=True,
            )
    destroy_process_group()


def group_of(way: str, ranks: int) -> Any:
    """Make a group whose collectives go one way."""
    group = get_platform().groups.second_group(range(ranks))
    if way != "gloo":
        core = core_name()
        opening.core_name = lambda: "python" if way == "python" else core
        carrier = open_carrier(group, lambda payload: carriers._share(group, payload))
        assert carrier is not None
        carriers._carriers[group] = carrier
    return group


def call_of(kind: str, size: int, way: str, group: Any, dtype: torch.dtype) -> Callable[[], None]:
    """Make a function that does a collective once."""
    collectives, ranks = get_platform().collectives, group.size()
    count = size // dtype.itemsize // ranks * ranks
    whole, piece = torch.ones(count, dtype=dtype), torch.ones(count // ranks, dtype=dtype)
    other = torch.empty_like(whole)
    options: dict[str, Any] = {"group": group, "async_op": way == "thread"}
    calls = {
        "all_gather": lambda: collectives.all_gather(other, piece, **options),
        "reduce_scatter": lambda: collectives.reduce_scatter(piece, whole, **options),
        "all_reduce": lambda: collectives.all_reduce(other, **options),
        "all_to_all": lambda: collectives.all_to_all(other, whole, **options),
        "broadcast": lambda: collectives.broadcast(other, 0, **options),
        "barrier": lambda: collectives.barrier(group),
    }

    def call() -> None:
        handle = calls[kind]()
        if handle is not None:
            handle.wait()

    return call


def measure(
    calls: dict[str, Callable[[], None]], group: Any, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each way's median of seconds and its mean of CPU seconds on this rank."""
    walls: dict[str, list[float]] = {way: [] for way in calls}
    processor = dict.fromkeys(calls, 0.0)
    for turn in range(repeats + 2):
        for way, call in calls.items():
            get_platform().collectives.barrier(group)
            used, begun = cpu(), time.perf_counter()
            call()
            wall, more = time.perf_counter() - begun, cpu() - used
            if turn >= 2:
                walls[way].append(wall)
                processor[way] += more / repeats
    return {way: statistics.median(each) for way, each in walls.items()}, processor


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
