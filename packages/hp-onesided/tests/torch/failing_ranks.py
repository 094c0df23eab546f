"""Ranks of which one is killed, stopped or ends in the middle; see `test_faults.py` and `test_messages.py`."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_platform import get_platform
from hp_platform.communication.carriers import carrier_of

RANKS = 3


def _open(rank: int, path: str, limit: float, environment: dict[str, str]) -> tuple[Any, Any]:
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, RANKS)
    wait = timedelta(seconds=limit)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=wait)
    group, collectives = get_platform().groups.default_group(), get_platform().collectives
    assert carrier_of(group) is not None
    return group, collectives


def main(connection: Any, rank: int, path: str, how: str, limit: float, environment: dict[str, str]) -> None:
    """Communicate until that raises, and tell what, and the seconds that the last collective took.

    Rank 1 gives up when it is told so.
    """
    group, collectives = _open(rank, path, limit, environment)
    tensor, whole = torch.ones(1 << 16), torch.empty(RANKS << 16)
    collectives.barrier(group)
    connection.send(os.getpid())
    try:
        while True:
            begun = time.monotonic()
            if rank == 1 and connection.poll():
                connection.recv()
                get_platform().groups.give_up("ValueError: no such file")
                break
            if how == "waits":
                handles = [collectives.all_gather(whole, tensor, group=group, async_op=True) for _ in range(2)]
                for handle in handles:
                    assert handle is not None
                    handle.wait()
            elif how == "messages":
                handle = collectives.recv(whole[: len(tensor)], (rank - 1) % RANKS, group=group, async_op=True)
                collectives.send(tensor, (rank + 1) % RANKS, group=group)
                assert handle is not None
                handle.wait()
            else:
                collectives.all_reduce(tensor, "avg", group=group)
    except RuntimeError as error:
        connection.send((type(error).__name__, getattr(error, "ranks", None), str(error), time.monotonic() - begun))
    connection.recv()


def leave(connection: Any, rank: int, path: str, limit: float, environment: dict[str, str]) -> None:
    """Leave at once as rank 0; as the others send each other a message afterwards, when they are told to."""
    group, collectives = _open(rank, path, limit, environment)
    tensor = torch.full((50_000,), 7.0)
    if rank == 1:
        collectives.send(tensor, 2, group=group)
    connection.send("there")
    connection.recv()
    if rank == 1:
        collectives.recv(tensor, 2, group=group)
        connection.send("came")
    elif rank == 2:
        collectives.send(torch.ones(50_000), 1, group=group)
        connection.recv()
        collectives.recv(tensor, 1, group=group)
        connection.send(tensor.tolist())
    hp_platform.destroy_process_group()
