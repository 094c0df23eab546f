"""A rank of the testing pool on PyTorch: how it joins the others, its seed, and its tensors from arrays."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from hp_platform import collectives, groups
from hp_platform.communication.carriers import carrier_of
from hp_platform.devices import devices
from hp_platform.extend import init_on_this_machine
from hp_testing.pools.target import AUDIT
from hp_testing.torch.stream_audit import Audit, start

_audits: list[Audit] = []
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def join(rank: int, world_size: int, announce: Callable[[int], None], port: Callable[[], int]) -> None:
    """Meet the other ranks of this machine and initialise the default group.

    Args:
        rank: this rank.
        world_size: number of ranks.
        announce: tells the other ranks the port that rank 0 listens on.
        port: waits for what rank 0 announced.
    """
    torch.set_num_threads(1)  # ranks share the cores
    devices.set_device(rank % devices.count)
    if os.environ.get(AUDIT) and devices.kind != "cpu":
        _audits.append(start(devices.kind))
    # Two ranks on one device are more than nccl and hccl can do.
    backend = "gloo" if world_size > devices.count else None
    if sys.platform in _LOOPBACK:  # no look-up of the host's name, which is slow or fails on some machines
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    init_on_this_machine(rank, world_size, announce, port, backend)
    collectives.barrier()


def check_streams() -> None:
    """Raise what the audit of streams, where there is one, has found since the last call.

    Raises:
        AssertionError: it found something.
    """
    found = [fault for audit in _audits for fault in audit.take_faults()]
    if found:
        raise AssertionError(f"{len(found)} faults of streams:\n" + "\n".join(found[:5]))


def seed(value: int) -> None:
    """Seed every generator, without marking them as seeded by `manual_seed`."""
    torch.manual_seed(value)


def issued() -> dict[tuple[int, ...], int]:
    """Count the collectives that this rank has issued in each of its groups."""
    counts = {}
    if dist.is_initialized():
        for ranks, group in groups.known_groups().items():
            with contextlib.suppress(RuntimeError):  # a backend that doesn't count
                counts[ranks] = cast(Any, group)._get_sequence_number_for_group()
            carrier = carrier_of(group)
            if carrier is not None:
                counts[ranks] = counts.get(ranks, 0) + carrier.issued
    return counts


def as_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Make a tensor with an array's values on the device in use."""
    return torch.tensor(np.asarray(array), device=devices.current_device()).to(getattr(torch, dtype))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor's values to an array; bfloat16, which NumPy lacks, becomes float32."""
    values = tensor.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy().copy()
