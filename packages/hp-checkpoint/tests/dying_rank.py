"""A rank of `test_lost_rank`: one is killed in the middle of a save, or of a stream of weights."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import hp_platform
from hp_checkpoint import Checkpointer, stream_weights
from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_testing import device_type

TIMEOUT = timedelta(seconds=60)


def joined(connection: Connection, rank: int, ranks: int, environment: dict[str, str]) -> torch.nn.Module:
    """Join the group and return a model whose weight is sharded."""
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    port = 0 if rank == 0 else connection.recv()
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    if rank == 0:
        connection.send(store.port)
    hp_platform.init_process_group(store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    mesh = init_device_mesh(device_type(), (ranks,))
    model = torch.nn.Module()
    for name in ("w", "v"):
        setattr(model, name, torch.nn.Parameter(distribute_tensor(torch.arange(4000.0), mesh, [Shard(0)])))
    return model


def main(connection: Connection, rank: int, ranks: int, doomed: int, folder: str, environment: dict[str, str]) -> None:
    model = joined(connection, rank, ranks, environment)
    checkpoints = Checkpointer(Path(folder), background=False)
    checkpoints.save(1, model)
    if rank == doomed:
        own = os.pwrite

        def pwrite(*arguments):
            own(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        os.pwrite = pwrite
    begin = time.monotonic()
    try:
        checkpoints.save(2, model)
    except Exception as error:
        connection.send((type(error).__name__, getattr(error, "ranks", ()), time.monotonic() - begin))
    else:
        connection.send(("nothing", (), 0.0))


def stream(connection: Connection, rank: int, ranks: int, doomed: int, environment: dict[str, str]) -> None:
    model = joined(connection, rank, ranks, environment)
    outcome = ("nothing", ())
    try:
        for _ in stream_weights(model, bucket=1024):
            if rank == doomed:
                os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:
        outcome = (type(error).__name__, getattr(error, "ranks", ()))
    connection.send(outcome)
