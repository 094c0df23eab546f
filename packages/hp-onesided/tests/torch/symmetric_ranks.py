"""Ranks that wait for each other's signals until they are killed; see `test_lost_memory.py`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_onesided import Signal, SymmetricMemory
from hp_onesided.memory import host
from hp_platform import get_platform

RANKS = 3


def main(connection: Any, rank: int, path: str, core: str, nbytes: int, environment: dict[str, str]) -> None:
    """Wait for what never comes, and tell what came instead; rank 1 waits for nobody."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if core == "python":
        host.core_name = lambda: "python"
    store = dist.FileStore(path, RANKS)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    group = get_platform().groups.default_group()
    before, told = shared_files(), ()
    try:
        with SymmetricMemory(group, nbytes) as memory:
            signal = Signal(memory, 0)
            connection.send(os.getpid())
            if rank == 1:
                connection.recv()
            if rank == 2:
                memory.all_reduce(memory.local((4,), torch.float32))
            signal.wait(1, rank=2, limit=600.0)  # from one that waits for rank 1
    except RuntimeError as error:
        told = type(error).__name__, getattr(error, "ranks", None), str(error)
    connection.send((*told, shared_files() - before))  # without the error, whose frames hold the memory
    connection.recv()


def shared_files() -> int:
    """Count open files of memory and of processes, which are what symmetric memory opens."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own is gone, and another thread's may be
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd" in file or "pidfd" in file for file in files)
