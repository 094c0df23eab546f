"""Collectives of ranks of two hosts in two levels, by wires, and through gloo alone, turn by turn.

    python packages/hp-onesided/benchmarks/bench_levels.py
    python packages/hp-onesided/benchmarks/bench_levels.py --sizes 64M --repeats 50

The ranks are processes of this machine that name two hosts, so what goes between hosts goes over the loopback device,
as fast as gloo copies, which no network is. Each line is a collective of float32: gloo's milliseconds (the median of a
rank, the slowest rank's) and the MiB that a rank receives by TCP; then, of each other way, the ratio to those
milliseconds, and the MiB. A size is the whole tensor's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import hp_onesided
from hp_onesided import Wire, opening
from hp_platform import destroy_process_group, get_platform, init_process_group
from hp_platform.communication import carriers
from hp_platform.torch import peers

UNITS = {"K": 2**10, "M": 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", default=["256K", "16M"])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    sizes = [int(text[:-1]) * UNITS[text[-1]] for text in options.sizes]
    print("| collective | bytes | gloo: ms, MiB | two levels | all-reduce by bf16 | by int8 |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        arguments = options.ranks, str(Path(folder, "store")), sizes, options.repeats
        multiprocessing.spawn(work, arguments, nprocs=options.ranks)


def work(rank: int, ranks: int, path: str, sizes: list[int], repeats: int) -> None:
    """Measure on one rank, and print on the first."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    hosts = [f"host {2 * each // ranks}" for each in range(ranks)]
    opening.own_network = lambda: hosts[rank]
    peers.networks = lambda ranks: [hosts[each] for each in ranks]
    os.environ[carriers.TRANSPORT] = "backend"
    init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    plain = get_platform().groups.default_group()
    os.environ[carriers.TRANSPORT] = "auto"
    levels = get_platform().groups.second_group(range(ranks))
    for size in sizes:
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            ways = {"gloo": call_of(kind, size, plain), "two levels": call_of(kind, size, levels)}
            if kind == "all_reduce":
                values = torch.ones(size // 4)
                for dtype in ("bf16", "int8"):
                    wire: Any = Wire(dtype)
                    ways[dtype] = partial(hp_onesided.all_reduce, values, wire, "avg", group=plain)
            walls = measure(ways, plain, repeats)
            mine = torch.tensor(list(walls.values()), dtype=torch.float64)
            dist.all_reduce(mine[:, 0], dist.ReduceOp.MAX)
            if rank == 0:
                first = mine[0, 0].item()
                cells = [f"{first * 1e3:.2f}, {walls['gloo'][1] / 2**20:.2f}"]
                for way in ("two levels", "bf16", "int8"):
                    place = list(walls).index(way) if way in walls else None
                    ratio = (
                        "-" if place is None else f"{mine[place, 0].item() / first:.2f}, {walls[way][1] / 2**20:.2f}"
                    )
                    cells.append(ratio)
                print(f"| {kind} | {size} | {' | '.join(cells)} |", flush=True)
    destroy_process_group()


def call_of(kind: str, size: int, group: Any) -> Callable[[], object]:
    """Make a function that does a collective once."""
    collectives = get_platform().collectives
    whole, piece = torch.ones(size // 4), torch.ones(size // 4 // group.size())
    return {
        "all_reduce": lambda: collectives.all_reduce(whole, "avg", group=group),
        "reduce_scatter": lambda: collectives.reduce_scatter(piece, whole, "avg", group=group),
        "all_gather": lambda: collectives.all_gather(whole, piece, group=group),
    }[kind]


def measure(calls: dict[str, Callable[[], object]], group: Any, repeats: int) -> dict[str, tuple[float, float]]:
    """Return each way's median of seconds and its mean of bytes received, on this rank."""
    walls: dict[str, list[float]] = {way: [] for way in calls}
    came = dict.fromkeys(calls, 0.0)
    for turn in range(repeats + 2):
        for way, call in calls.items():
            dist.barrier(group)
            before, begun = received(), time.perf_counter()
            call()
            wall = time.perf_counter() - begun
            more = received() - before
            if turn >= 2:
                walls[way].append(wall)
                came[way] += more / repeats
    return {way: (statistics.median(each), came[way]) for way, each in walls.items()}


def received() -> int:
    """Count the bytes that have come to this process by TCP."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is gone
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    information = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("Q", information, 128)[0]  # tcpi_bytes_received
    return total


if __name__ == "__main__":
    main()
