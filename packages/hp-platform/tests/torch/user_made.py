"""Ranks whose groups torch made, and of which one ends; see `test_peers_of_torch.py`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hp_platform import LostRankError, destroy_process_group, get_platform
from hp_platform.communication.checks import observers
from hp_platform.torch import peers


def main(connection: Any, rank: int, path: str, environment: dict[str, str]) -> None:
    """A rank whose groups torch made; rank 1 ends, and the others call on."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=3, timeout=timedelta(seconds=60))
    groups, collectives = get_platform().groups, get_platform().collectives
    group = groups.new_group(range(3))
    assert group is dist.group.WORLD
    tensor = torch.ones(2)
    collectives.all_reduce(tensor, group=group)
    if rank == 1:
        os._exit(3)
    told = []
    pending = peers.Pending(None, "all_gather", group)
    for call in (
        lambda: collectives.all_reduce(tensor, group=group),
        lambda: collectives.all_reduce(tensor, group=group),  # refused at once
        lambda: collectives.barrier(group),
        pending.wait,
    ):
        try:
            call()
        except LostRankError as error:
            told.append((error.ranks, type(error.__cause__).__name__))
    destroy_process_group()
    connection.send((told, len(observers), peers._here))
