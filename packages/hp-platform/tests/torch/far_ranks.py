"""Ranks of which one ends or gives up while the others wait, far from it; see `test_peers_of_torch.py`."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_platform import LostRankError, get_platform


def main(connection: Any, rank: int, path: str, how: str, environment: dict[str, str]) -> None:
    """Rank 0 waits for rank 1, rank 1 for rank 2, and so on; the last one ends, or gives up; nobody else ends."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, 5)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=5, timeout=timedelta(minutes=10))
    groups, collectives = get_platform().groups, get_platform().collectives
    tensor = torch.ones(2)
    pairs = [groups.new_group([first, first + 1]) for first in (rank - 1, rank) if 0 <= first < 4]
    collectives.barrier()
    if rank == 4 and how == "ends":
        os._exit(3)
    if rank == 4:
        threading.Timer(0.5, groups.give_up, ("ValueError: no such file",)).start()
    try:
        collectives.all_reduce(tensor, group=pairs[-1]) if rank < 4 else collectives.barrier()
    except LostRankError as error:
        connection.send((type(error).__name__, error.ranks, str(error)))
    try:
        collectives.barrier()  # refused at once
    except LostRankError as error:
        connection.send((type(error).__name__, error.ranks, str(error)))
    connection.recv()  # all have heard
    hp_platform.destroy_process_group()
