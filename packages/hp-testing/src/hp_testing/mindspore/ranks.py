"""What a rank of the testing pool does with MindSpore."""

from __future__ import annotations

from collections.abc import Callable

import mindspore

from hp_platform import collectives, groups
from hp_platform.devices import devices
from hp_platform.extend import init_on_this_machine
from hp_platform.mindspore import collectives as primitives
from hp_platform.mindspore import random


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
    init_on_this_machine(rank, world_size, announce, port)
    collectives.barrier()


def seed(value: int) -> None:
    """Seed every generator, without marking them as seeded by `manual_seed`."""
    random.seed(value)


def issued() -> dict[tuple[int, ...], int]:
    """Count the collectives that this rank has issued in each of its groups."""
    if not groups.is_initialized():
        return {}
    return {ranks: primitives.issued[group] for ranks, group in groups.known_groups().items()}
