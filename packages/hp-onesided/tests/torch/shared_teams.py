"""Ranks of a group that are threads of this process, each with its own core over memory that they share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hp_onesided.carriers.carrier import SharedMemory
from hp_onesided.carriers.messages import Messages
from hp_onesided.cores.core import Team
from hp_onesided.cores.counters import counters_by
from hp_onesided.cores.library import library
from hp_onesided.cores.native import NativeCore
from hp_onesided.cores.processes import hold
from hp_onesided.cores.python import PythonCore
from hp_onesided.cores.segment import Segment, Shape, allocate
from hp_onesided.planning.steps import slot_bytes

CORES = ("native", "python")


def carriers(size: int, core: str, slot: int | None = None, limit: float = 20.0) -> list[SharedMemory]:
    """Make the carriers of all ranks of a group.

    Args:
        size: of the group.
        core: by its name.
        slot: bytes; None is as in a group of that size.
        limit: seconds.
    """
    loaded = library()
    if core == "native" and loaded is None:
        pytest.skip("needs a C++ compiler")
    shape = Shape(size, slot or slot_bytes(size))
    segments = []
    for _ in range(size):
        descriptor = allocate(shape.nbytes)
        segments.append(Segment(descriptor, shape.nbytes))
        os.close(descriptor)
    made = []
    for rank in range(size):
        peers = {peer: hold(os.getpid()) for peer in range(size) if peer != rank}
        team = Team(rank, segments, shape, [os.getpid()] * size, peers, limit)
        own = NativeCore(loaded, team) if core == "native" and loaded is not None else PythonCore(team)
        counters = counters_by(loaded if core == "native" else None, segments, peers)
        made.append(SharedMemory(own, team, range(size), Messages(team, counters, own.failed)))
    return made


@contextlib.contextmanager
def team(size: int, core: str, slot: int | None = None, limit: float = 20.0) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that calls another one on each rank, with the rank and its carrier, and returns the results."""
    made = carriers(size, core, slot, limit)
    with ThreadPoolExecutor(size) as pool:

        def on_all(function: Callable[..., Any]) -> list[Any]:
            return [each.result() for each in [pool.submit(function, rank, made[rank]) for rank in range(size)]]

        yield on_all
        on_all(lambda rank, carrier: carrier.close())
