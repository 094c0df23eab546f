"""Ranks of which one is killed or stopped in the middle of collectives; see `test_faults.py`."""

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


def main(connection: Any, rank: int, path: str, how: str, limit: float, environment: dict[str, str]) -> None:
    """Communicate until that raises, and tell what, and the seconds that the last collective took."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, RANKS)
    wait = timedelta(seconds=limit)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=wait)
    group, collectives = get_platform().groups.default_group(), get_platform().collectives
    assert carrier_of(group) is not None
    tensor, whole = torch.ones(1 << 16), torch.empty(RANKS << 16)
    collectives.barrier(group)
    connection.send(os.getpid())
    try:
        while True:
            begun = time.monotonic()
            if how == "waits":
                handles = [collectives.all_gather(whole, tensor, group=group, async_op=True) for _ in range(2)]
                for handle in handles:
                    assert handle is not None
                    handle.wait()
            else:
                collectives.all_reduce(tensor, "avg", group=group)
    except RuntimeError as error:
        connection.send((type(error).__name__, getattr(error, "ranks", None), str(error), time.monotonic() - begun))
    connection.recv()
