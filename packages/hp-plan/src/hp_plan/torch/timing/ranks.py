"""Processes of this machine as ranks: what they take for real, by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hp_moe.extend import balanced, forced_routes
from hp_plan.dry.stages import StagePeers, play_stages
from hp_plan.plan import ParallelPlan
from hp_plan.torch.dry.playing import Training
from hp_platform import get_platform
from hp_platform.extend import divide_threads, init_on_this_machine, usable_cores

_UNCOUNTED = 2
"""Steps before those that are timed: they plan, compile and make the optimizer's states."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """What a step took on the slowest rank, the median of some.

    Attributes:
        clock: seconds by the clock.
        cpu: seconds that the rank's process computed.
    """

    clock: float
    cpu: float


def ranks_here(most: int) -> int:
    """Return how many ranks this machine has a device for, `most` at most: on the CPU each core is one."""
    devices = get_platform().devices
    return min(most, usable_cores() if devices.kind == "cpu" else devices.count)


def check_devices(ranks: int) -> None:
    """Check that this machine has a device for each of some ranks; on the CPU ranks share the cores.

    Raises:
        ValueError: there are fewer.
    """
    devices = get_platform().devices
    if devices.kind != "cpu" and ranks > devices.count:
        raise ValueError(f"{ranks} ranks can't run here: this machine has {devices.count} devices of {devices.kind}")


def on_ranks(task: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call a function on ranks of this machine, joined by a process group, and return what each returned.

    Args:
        task: a function of a module, called on each rank.
        ranks: how many.
        *args: for the function, pickled.

    Raises:
        ValueError: the machine has fewer devices.
    """
    check_devices(ranks)
    arguments = {rank: (rank, ranks, task, *args) for rank in range(ranks)}
    results = play_stages(_join, arguments, _itself, preload=(__name__,))
    return [results[rank] for rank in range(ranks)]


def _itself(rank: int) -> int:
    return rank


def _join(rank: int, ranks: int, task: Callable[..., Any], *rest: Any) -> Any:
    *args, peers = rest
    with _world(rank, ranks, peers):
        return task(*args)


@contextmanager
def _world(rank: int, ranks: int, peers: StagePeers) -> Iterator[None]:
    groups, devices = get_platform().groups, get_platform().devices
    everyone = range(ranks)
    if devices.kind == "cpu":
        torch.set_num_threads(divide_threads(ranks))
    else:
        devices.set_device(rank)

    def announce(number: int) -> None:
        peers.gather(b"%d" % number, everyone)

    init_on_this_machine(rank, ranks, announce, lambda: int(peers.gather(b"", everyone)[0]))
    try:
        yield
        peers.gather(b"", everyone)  # what a rank sent last may still be on its way
    finally:
        groups.destroy_process_group()


def time_steps(plan: ParallelPlan, steps: int) -> StepSeconds:
    """Run training steps of a plan on as many ranks of this machine, on random tokens.

    The tokens of expert layers are spread evenly, as a dry run takes them to be.

    Args:
        plan: the plan.
        steps: how many are timed.

    Raises:
        ValueError: the machine has too few devices.
    """
    seconds = on_ranks(_steps, plan.mesh.world_size, plan, steps)
    return StepSeconds(
        *(statistics.median(max(each) for each in zip(*kind, strict=True)) for kind in zip(*seconds, strict=True))
    )


def _steps(plan: ParallelPlan, steps: int) -> tuple[list[float], list[float]]:
    devices = get_platform().devices
    clock: list[float] = []
    cpu: list[float] = []
    with forced_routes(balanced):
        training = Training(plan, devices.current_device())
        training.draw_tokens()
        for number in range(_UNCOUNTED + steps):
            devices.synchronize()
            begin, computed = time.perf_counter(), time.process_time()
            training.step()
            devices.synchronize()
            if number >= _UNCOUNTED:
                clock.append(time.perf_counter() - begin)
                cpu.append(time.process_time() - computed)
    return clock, cpu
