"""A table of this machine, measured: rates of its device, and of the network between its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hp_plan.torch.dry.ledger import Ledger
from hp_plan.torch.timing.ranks import on_ranks, ranks_here
from hp_plan.tuning.hardware import Hardware, Level
from hp_platform import get_platform
from hp_platform.extend import divide_threads

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_ROUNDS = 5
_MANY = 1 << 20  # ranks: more than a machine has
_SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24))  # bytes of a gathered tensor


def probe_device(ranks: int) -> dict[str, Any]:
    """Measure this process's device.

    Args:
        ranks: how many share the machine, and on the CPU its cores and memory.

    Returns:
        What `Hardware` is made of, without levels.
    """
    devices = get_platform().devices
    device, on_cpu = devices.current_device(), devices.kind == "cpu"
    if on_cpu:
        torch.set_num_threads(divide_threads(ranks))
    total = devices.total_memory() or 0
    return {
        "name": devices.name(),
        "device": devices.name(),
        "memory": total // ranks if on_cpu else total,
        "overhead": 0,
        "flops": {name: _product_rate(name, device) for name in _DTYPES},
        "bandwidth": _bandwidth(device),
        "launch": 0.0 if on_cpu else _launch_seconds(device),
        "host": _issue_seconds(device),
        "kind": devices.kind,
    }


def _fastest(function: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls, after one."""
    synchronize, best = get_platform().devices.synchronize, float("inf")
    for number in range(_ROUNDS + 1):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        if number:
            best = min(best, time.perf_counter() - begin)
    return best


def _product_rate(dtype: str, device: torch.device) -> float:
    size = 512 if device.type == "cpu" else 8192
    left, right = (torch.rand(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2.0 * size**3 / _fastest(lambda: left @ right)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros((64 if device.type == "cpu" else 1024) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _fastest(lambda: target.copy_(source))


def _issue_seconds(device: torch.device) -> float:
    """Return what the host takes for an operator of a training step: of a tiny one, which computes next to nothing."""
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU()) for _ in range(8)]
    model = torch.nn.Sequential(*layers).to(device)
    sample = torch.zeros(2, 4, device=device)

    def step() -> None:
        model(sample).sum().backward()

    with Ledger((device.type,)) as ledger:
        step()
    return _fastest(step) / ledger.step.operations


def _launch_seconds(device: torch.device) -> float:
    """Return the seconds from a kernel's end to the next one's begin, where the host is ahead of the device."""
    module, count = get_platform().devices.device_module(), 256
    long, short = torch.rand(8192, 8192, device=device), torch.zeros(1, device=device)
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    for _ in range(2):
        long.matmul(long)
        begin.record()
        for _ in range(count):
            short.add_(1)
        end.record()
        module.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / count


def gather_seconds() -> list[float]:
    """Time all-gathers of `_SIZES` bytes among all ranks; each of them calls this."""
    collectives, groups, devices = get_platform().collectives, get_platform().groups, get_platform().devices
    device, ranks, everyone = devices.current_device(), groups.size(), groups.default_group()
    seconds = []
    for size in _SIZES:
        own = torch.zeros(-(-size // ranks), dtype=torch.uint8, device=device)
        whole = torch.zeros(len(own) * ranks, dtype=torch.uint8, device=device)
        calls = 20 if size <= 1 << 20 else 4

        def several(own: torch.Tensor = own, whole: torch.Tensor = whole, calls: int = calls) -> None:
            for _ in range(calls):
                collectives.all_gather(whole, own, group=everyone)

        seconds.append(_fastest(several) / calls)
    return seconds


def level_of(ranks: int, seconds: list[float]) -> Level:
    """Return the level of the network whose price of an all-gather is nearest to what was measured.

    The price is `(ranks - 1) latency + size (ranks - 1) / ranks / bandwidth`; errors count by their part of each.

    Args:
        ranks: of the group.
        seconds: of a gather, for each of `_SIZES`.
    """
    sizes, taken = np.array(_SIZES, dtype=np.float64), np.array(seconds)
    rows = np.stack([np.full_like(sizes, ranks - 1), sizes * (ranks - 1) / ranks], axis=1) / taken[:, None]
    latency, each = np.linalg.lstsq(rows, np.ones_like(taken), rcond=None)[0]
    fastest = taken.min() / (ranks - 1)
    return Level("host", None, max(float(latency), 0.1 * fastest), 1 / max(float(each), 1e-13))


def probe(ranks: int | None = None) -> Hardware:
    """Measure this machine: its device, and the network between so many ranks on it.

    The rates are those of one kernel and one collective at a time, the fastest of five. Levels beyond this machine are
    not measured: add them to the table by hand.

    Example:
        >>> probe().write("own.toml")

    Args:
        ranks: processes, one for each device; on the CPU they share the cores. None is one for each device or core.

    Raises:
        ValueError: fewer than one rank, or more than there are devices.
    """
    ranks = ranks_here(_MANY) if ranks is None else ranks
    if ranks < 1:
        raise ValueError(f"probe measures ranks of this machine, got {ranks} of them")
    rates = on_ranks(probe_device, 1, ranks)[0]
    times = on_ranks(gather_seconds, ranks) if ranks > 1 else []
    if not times:
        alone = Level("host", 1, max(rates["launch"], rates["host"]), rates["bandwidth"])
        return Hardware(**rates, levels=(alone,))
    slowest = [max(each) for each in zip(*times, strict=True)]
    level = level_of(ranks, slowest)
    return Hardware(**rates, levels=(level if get_platform().devices.kind == "cpu" else replace(level, ranks=ranks),))
