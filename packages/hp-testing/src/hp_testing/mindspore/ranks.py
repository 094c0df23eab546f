"""A rank of the testing pool on MindSpore: how it joins the others, its seed, and its tensors from arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np

from hp_platform import collectives, groups
from hp_platform.devices import devices
from hp_platform.extend import init_on_this_machine
from hp_platform.mindspore import collectives as primitives
from hp_platform.mindspore import random


def share_cores() -> None:
    """Compute where a call is made: ranks, and tests that run beside each other, share the cores.

    Threads of the asynchronous pipeline would wait for each other there: one process takes ten times as long.
    """
    mindspore.runtime.dispatch_threads_num(1)
    if devices.kind == "cpu":
        mindspore.runtime.launch_blocking()


def join(rank: int, world_size: int, announce: Callable[[int], None], port: Callable[[], int]) -> None:
    """Meet the other ranks of this machine and initialise the default group.

    Args:
        rank: this rank.
        world_size: number of ranks.
        announce: tells the other ranks the port that rank 0 listens on.
        port: waits for what rank 0 announced.
    """
    share_cores()
    init_on_this_machine(rank, world_size, announce, port)
    collectives.barrier()


def check_streams() -> None:
    """Do nothing: MindSpore has no trace of streams."""


def seed(value: int) -> None:
    """Seed every generator, without marking them as seeded by `manual_seed`."""
    random.seed(value)


def issued() -> dict[tuple[int, ...], int]:
    """Count the collectives that this rank has issued in each of its groups."""
    if not groups.is_initialized():
        return {}
    return {ranks: primitives.issued[group] for ranks, group in groups.known_groups().items()}


def as_tensor(array: np.ndarray, dtype: str) -> Any:
    """Make a tensor with an array's values on the device in use."""
    return mindspore.Tensor(np.asarray(array)).astype(getattr(mindspore, "bool_" if dtype == "bool" else dtype))


def as_array(tensor: Any) -> np.ndarray:
    """Copy a tensor's values to an array; bfloat16, which NumPy lacks, becomes float32."""
    values = tensor.astype(mindspore.float32) if tensor.dtype is mindspore.bfloat16 else tensor
    return values.asnumpy().copy()
