"""Ranks that wait for each other in different groups; see `test_watching_of_torch.py`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_platform import LostRankError, get_platform


def main(connection: Any, rank: int, folder: str, environment: dict[str, str]) -> None:
    """Ranks 0 and 1 enter two groups of theirs in different orders; rank 2 waits for both."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    sys.stderr = open(f"{folder}/output-{rank}", "w", encoding="utf-8")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(minutes=10))
    groups, collectives = get_platform().groups, get_platform().collectives
    tensor = torch.ones(2)
    hp_platform.watch_hangs(1.0, then="end")
    if rank < 2:
        pairs = [groups.new_group([0, 1]), groups.second_group([0, 1])]
        for pair in pairs if rank == 0 else reversed(pairs):
            collectives.barrier(pair)
    try:
        collectives.all_reduce(tensor, group=groups.default_group())
    except LostRankError as error:
        connection.send(error.ranks)
