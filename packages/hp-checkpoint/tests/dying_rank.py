"""A rank of `test_lost_rank`: at a stage of a save or a load one is killed, or waits there to be killed with all."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_checkpoint import Checkpointer, background, host_memory, load, loading, transfers
from hp_checkpoint.host_memory import HostMemory
from hp_checkpoint.ranks import Ranks
from hp_checkpoint.reads import exchange
from hp_checkpoint.saving import save_state
from hp_checkpoint.snapshot import Arena
from hp_checkpoint.state import flatten
from hp_dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type

TIMEOUT = timedelta(seconds=60)
PER_ROUND = 16 << 10
ROWS = 128  # of 1,000 elements
STAGES: dict[str, tuple[Any, str]] = {
    "saves: a write": (os, "pwrite"),
    "saves beside the training: the copy": (Arena, "store"),
    "saves beside the training: its writer has the copy": (background, "send"),
    "loads: it has made its memory": (host_memory, "_created"),
    "loads: it has opened a neighbour's memory": (host_memory, "_opened"),
    "loads: a read": (transfers, "read_at"),
    "loads: it has offered a unit": (HostMemory, "offer"),
    "loads: another one's unit is there": (HostMemory, "memory_of"),
    "loads: it has copied another one's unit": (HostMemory, "release"),
    "loads: it has given back its memory": (HostMemory, "close"),
    "loads: an exchange between hosts": (Ranks, "all_to_all"),
}
"""What is called at each stage; the rank dies when that returns."""


def values() -> torch.Tensor:
    """Return what the ranks save."""
    return torch.arange(1000.0 * ROWS).reshape(ROWS, 1000)


def main(
    connection: Connection,
    rank: int,
    ranks: int,
    stage: str,
    doomed: int,
    killed: bool,
    hosts: str,
    folder: Path,
    environment: dict[str, str],
) -> None:
    """Save a step and load it, or save another one; send how that ended.

    Args:
        connection: to the test.
        rank: of this process.
        ranks: how many there are.
        stage: at which one stops, of `STAGES`.
        doomed: the one that does.
        killed: it is killed there; else it says that it is there, and waits.
        hosts: of each rank, a digit.
        folder: of the checkpoints.
        environment: of the test.
    """
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    port = 0 if rank == 0 else connection.recv()
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    if rank == 0:
        connection.send(store.port)
    hp_platform.init_process_group(store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    mesh = init_device_mesh(device_type(), (ranks,))
    saved = {"w": distribute_tensor(values(), mesh, [Shard(0)])}
    checkpoints = Checkpointer(folder, background=stage.startswith("saves beside"))
    save_state(flatten({"model": saved}), checkpoints.path(1), Ranks(), step=1, block_bytes=PER_ROUND)
    transfers.PER_ROUND = PER_ROUND
    loading.exchange = functools.partial(exchange, per_round=PER_ROUND)
    host = folder.parent / f"host{rank}"
    host.write_text(hosts[rank] * 32)
    host_memory._BOOT = host
    if rank == doomed:
        _stop_at(*STAGES[stage], lambda: os.kill(os.getpid(), signal.SIGKILL) if killed else connection.send("there"))
    begin = time.monotonic()
    try:
        if stage.startswith("saves"):
            model = torch.nn.Module()
            model.w = torch.nn.Parameter(saved["w"])
            checkpoints.save(2, model).wait()
        else:
            new: dict[str, DTensor] = {"w": distribute_tensor(torch.zeros(ROWS, 1000), mesh, [Shard(1)])}
            load({"model": new}, checkpoint_id=checkpoints.path(1))
    except Exception as error:
        connection.send((type(error).__name__, getattr(error, "ranks", ()), time.monotonic() - begin))
    else:
        connection.send(("nothing", (), 0.0))


def _stop_at(owner: Any, name: str, action: Callable[[], None]) -> None:
    """Let a function end this process, or halt it, once it has done what it does."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def last(*arguments: Any, **options: Any) -> None:
        own(*arguments, **options)
        action()
        signal.pause()

    setattr(owner, name, last)
