"""What a rank of the testing pool does with MindSpore."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

import mindspore
from mindspore.mint.distributed import TCPStore

from hp_platform import collectives, groups
from hp_platform.devices import devices
from hp_platform.mindspore import collectives as primitives
from hp_platform.mindspore import random

_MEET = timedelta(seconds=60)


def join(rank: int, world_size: int, announce: Callable[[int], None], port: Callable[[], int]) -> None:
    """Meet the other ranks of this machine and initialise the default group.

    Args:
        rank: this rank.
        world_size: number of ranks.
        announce: tells the other ranks the port that rank 0 listens on.
        port: waits for what rank 0 announced.
    """
    mindspore.runtime.dispatch_threads_num(1)  # ranks share the cores
    if devices.kind == "cpu":  # threads of the asynchronous pipeline would wait for each other on shared cores
        mindspore.runtime.launch_blocking()
    if rank == 0:
        # The store wants a number. One that is bound with this option, and not listened on, is nobody else's but may be
        # bound again with the same option, as the store does.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            number = reserved.getsockname()[1]
            store = TCPStore("127.0.0.1", number, world_size, True, _MEET, wait_for_workers=False)
        announce(number)
    else:
        store = TCPStore("127.0.0.1", port(), world_size, False, _MEET, wait_for_workers=False)
    groups.init_process_group(store=store, rank=rank, world_size=world_size)
    collectives.barrier()


def seed(value: int) -> None:
    """Seed every generator, without marking them as seeded by `manual_seed`."""
    random.seed(value)


def issued() -> dict[tuple[int, ...], int]:
    """Count the collectives that this rank has issued in each of its groups."""
    if not groups.is_initialized():
        return {}
    return {ranks: primitives.issued[group] for ranks, group in groups.known_groups().items()}
