"""Collectives of many groups, then ranks that are killed: memory, threads, open files and shared memory stay flat.

python packages/hp-onesided/benchmarks/soak_onesided.py [--collectives N] [--groups N] [--kills N]
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_platform import get_platform, init_process_group
from hp_testing import run_ranks
from hp_testing.pools.processes import rank_processes

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--kills", type=int, default=200)
    options = parser.parse_args()
    for first, last in run_ranks(RANKS, many, options.collectives, options.groups, timeout=3600.0):
        print(f"after the first and the last group: KiB {first[0]}, {last[0]}; threads, files {first[1:]}, {last[1:]}")
        assert last[1:] == first[1:] and last[0] < first[0] + 2048, "something grows"
    before = shared()
    for number in range(options.kills):
        killed()
        if number == 0:
            before = shared()
    print(f"shared memory of the machine, KiB: after one kill {before}, after {options.kills} {shared()}")
    assert not any("onesided" in name for name in os.listdir("/dev/shm"))


def many(collectives: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Make groups one after the other, and use each; what this rank has after the first and after the last."""
    groups, own = get_platform().groups, get_platform().collectives
    seen = []
    for _ in range(count):
        group = groups.second_group(range(RANKS))
        for turn in range(collectives // count // 4):
            tensor, whole = torch.ones(turn % 97 + 1), torch.empty(RANKS * 16)
            handle = own.all_reduce(tensor, group=group, async_op=True)
            own.all_gather(whole, torch.ones(16), group=group)
            own.all_to_all(whole, torch.ones(RANKS * 16), group=group, async_op=True)  # nobody waits for it
            own.barrier(group)
            handle.wait()
        groups.destroy(group)
        del group
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4
        seen.append((resident, threading.active_count(), len(os.listdir("/proc/self/fd"))))
    return seen[0], seen[-1]


def shared() -> int:
    """Get the machine's shared memory, in KiB."""
    time.sleep(0.1)
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def killed() -> None:
    """Start ranks, and kill them in the middle of collectives."""
    with tempfile.TemporaryDirectory() as folder:
        preload = ["hp_testing.torch.ranks", "hp_onesided.opening"]
        with rank_processes(communicate, RANKS, str(Path(folder, "store")), preload=preload) as (_, connections):
            for pid in [connection.recv() for connection in connections]:
                os.kill(pid, signal.SIGKILL)


def communicate(connection: Connection, rank: int, path: str, environment: dict[str, str]) -> None:
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store: Any = dist.FileStore(path, RANKS)
    init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    platform, tensor = get_platform(), torch.ones(1 << 18)
    connection.send(os.getpid())
    while True:
        platform.collectives.all_reduce(tensor, "avg", group=platform.groups.default_group())


if __name__ == "__main__":
    main()
