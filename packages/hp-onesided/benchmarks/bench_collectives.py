"""Collectives of ranks on one host through shared memory and through gloo, turn by turn: wall and CPU time.

    python packages/hp-onesided/benchmarks/bench_collectives.py
    python packages/hp-onesided/benchmarks/bench_collectives.py --ranks 4 --kinds all_reduce --sizes 16M --repeats 100
    python packages/hp-onesided/benchmarks/bench_collectives.py --ranks 8 --kinds all_reduce barrier late --sizes 4K

Each line is a collective of float32, or of `--dtype`: gloo's wall time of a call (the median of a rank, the slowest
rank's) and CPU time (of all ranks together), then the ratios to them of the compiled core, of its thread (with
`async_op`), of the core in Python, of symmetric memory that the input lies in, and of torch.distributed's own calls
over the backend "hp_shared". A barrier is one of ten in a row: gloo's barrier before each turn lets the ranks go 0.1 ms
apart. "late" is a barrier to which rank 0 comes a millisecond after the others. A size is the whole tensor's: the
output of an all-gather, the input of the others. The machine may have other work: what takes turns shares it alike, and
CPU time hardly notices.
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

import hp_onesided.torch.backend  # noqa: F401 - registers "hp_shared"
from hp_onesided import SymmetricMemory, core_name, opening
from hp_onesided.opening import open_carrier
from hp_onesided.port import port
from hp_platform import destroy_process_group, get_platform, init_process_group
from hp_platform.communication import carriers

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "messages", "barrier", "late")
WAYS = ("gloo", "native", "thread", "python", "symmetric", "hp_shared")
ROW = 10
SIZELESS = ("barrier", "late")
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
    print(f"| ranks | collective | bytes | gloo ms: wall, CPU | native: wall, CPU | {' | '.join(WAYS[2:])} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            cases = [(kind, size) for kind in options.kinds for size in (sizes if kind not in SIZELESS else sizes[:1])]
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
        ways = (
            groups
            if kind != "messages"
            else {way: groups[way] for way in ("gloo", "native", "python") if way in groups}
        )
        calls = {way: call_of(kind, size, way, group, getattr(torch, dtype)) for way, group in ways.items()}
        own = over_ranks(*measure(calls, groups["gloo"], repeats, ROW if kind == "barrier" else 1))
        if rank == 0:
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
    if way == "hp_shared":
        opening.core_name = core_name
        return dist.new_group(backend=way)
    group = get_platform().groups.second_group(range(ranks))
    if way not in ("gloo", "symmetric"):
        opening.core_name = (lambda: "python") if way == "python" else core_name
        carrier = open_carrier(group, lambda payload: carriers._share(group, payload))
        assert carrier is not None
        carriers._carriers[group] = carrier
    return group


def call_of(kind: str, size: int, way: str, group: Any, dtype: torch.dtype) -> Callable[[], None]:
    """Make a function that does a collective once."""
    if kind == "late":
        barrier = call_of("barrier", size, way, group, dtype)

        def come() -> None:
            if group.rank() == 0:
                time.sleep(1e-3)
            barrier()

        return come
    collectives, ranks = get_platform().collectives, group.size()
    count = size // dtype.itemsize // ranks * ranks
    whole, piece = torch.ones(count, dtype=dtype), torch.ones(count // ranks, dtype=dtype)
    other = torch.empty_like(whole)
    if way == "symmetric":
        return call_of_memory(kind, SymmetricMemory(group, max(whole.nbytes, 1)), other, piece)
    if way == "hp_shared":
        return call_of_backend(kind, group, other, whole, piece)
    options: dict[str, Any] = {"group": group, "async_op": way == "thread"}
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: collectives.all_gather(other, piece, **options),
        "reduce_scatter": lambda: collectives.reduce_scatter(piece, whole, **options),
        "all_reduce": lambda: collectives.all_reduce(other, **options),
        "all_to_all": lambda: collectives.all_to_all(other, whole, **options),
        "broadcast": lambda: collectives.broadcast(other, 0, **options),
        "messages": lambda: send_around(other, whole, group),
        "barrier": lambda: collectives.barrier(group),
    }

    def call() -> None:
        handle = calls[kind]()
        if handle is not None:
            handle.wait()

    return call


def send_around(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    """Send to the next rank, and receive from the one before."""
    collectives, rank, ranks = get_platform().collectives, group.rank(), group.size()
    handle = collectives.recv(received, (rank - 1) % ranks, group=group, async_op=True)
    collectives.send(sent, (rank + 1) % ranks, group=group)
    assert handle is not None
    handle.wait()


def call_of_memory(kind: str, memory: SymmetricMemory, other: torch.Tensor, piece: torch.Tensor) -> Callable[[], None]:
    """Make a function that does a collective of inputs in symmetric memory once."""
    whole, part = (memory.local(each.shape, each.dtype) for each in (other, piece))
    return {
        "all_gather": lambda: memory.all_gather(other, part),
        "reduce_scatter": lambda: memory.reduce_scatter(piece, whole),
        "all_reduce": lambda: memory.all_reduce(whole),
        "all_to_all": lambda: memory.all_to_all(other, whole),
        "broadcast": lambda: port().copy(other, memory.peer(0, other.shape, other.dtype)),  # by no meeting
        "barrier": memory.barrier,
    }[kind]


def call_of_backend(
    kind: str, group: Any, other: torch.Tensor, whole: torch.Tensor, piece: torch.Tensor
) -> Callable[[], Any]:
    """Make a function that does a collective of torch.distributed once."""
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(other, piece, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(other, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(other, 0, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }[kind]


def measure(
    calls: dict[str, Callable[[], None]], group: Any, repeats: int, row: int = 1
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each way's median of seconds and mean of CPU seconds on this rank, of one of so many calls in a row."""
    walls: dict[str, list[float]] = {way: [] for way in calls}
    processor = dict.fromkeys(calls, 0.0)
    for turn in range(repeats + 2):
        for way, call in calls.items():
            get_platform().collectives.barrier(group)
            used, begun = cpu(), time.perf_counter()
            for _ in range(row):
                call()
            wall, more = time.perf_counter() - begun, cpu() - used
            if turn >= 2:
                walls[way].append(wall / row)
                processor[way] += more / row / repeats
    return {way: statistics.median(each) for way, each in walls.items()}, processor


def over_ranks(walls: dict[str, float], processor: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Return of each way the slowest rank's seconds, and the CPU seconds of all ranks."""
    slowest, used = (torch.tensor(list(each.values()), dtype=torch.float64) for each in (walls, processor))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(used)
    return {way: (wall, cpu) for way, wall, cpu in zip(walls, slowest.tolist(), used.tolist(), strict=True)}


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
