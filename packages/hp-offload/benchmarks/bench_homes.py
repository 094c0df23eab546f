"""Measure steps of a model whose parameters live on the host, and the bytes that visit the device.

    python packages/hp-offload/benchmarks/bench_homes.py --features 512 --blocks 20

The plain model and the placed ones take turns. On CPU the memory of the "device" is that of the same machine, so a copy
costs what `memcpy` does and nothing runs aside: seconds there are those of the copies and of Python, not of a link.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import nn

from hp_offload import place
from hp_platform import get_platform


def blocks(count: int, features: int) -> nn.Sequential:
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(  # noqa: E731
        nn.LayerNorm(features), nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
    )
    return nn.Sequential(*(layer() for _ in range(count)))


def seconds(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    devices = get_platform().devices
    devices.synchronize()
    begin = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    devices.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--room", type=int, default=4, help="blocks that fit in the cache")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = get_platform().devices.current_device()
    x = torch.randn(given.rows, given.features, device=device)
    plain = blocks(given.blocks, given.features)
    block = sum(each.nbytes for each in plain[0].parameters())
    print(f"torch {torch.__version__}, {get_platform().devices.name()}")
    models = {"plain": plain}
    reports = {}
    for ahead in (0, 1):
        models[f"ahead={ahead}"] = copy.deepcopy(plain)
        reports[f"ahead={ahead}"] = place(
            models[f"ahead={ahead}"], {"*": "host"}, cache=given.room * block, ahead=ahead
        )
    plain.to(device)
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.repeats + 2):
        for name, model in models.items():
            taken[name].append(seconds(model, optimizers[name], x))
    first = statistics.median(taken["plain"][2:])
    for name, each in taken.items():
        median = statistics.median(each[2:])
        print(f"{name}: {median:.3f} s a step, {median / first:.2f} of plain")
        if name in reports:
            report = reports[name].report()
            print(
                f"  parameters {report.host:,} bytes, fetched {report.fetched:,} ({report.fetched / report.host:.2f}),"
                f" gradients {report.gradients:,}, peak of the cache {report.peak:,} of {report.cache:,}"
            )


if __name__ == "__main__":
    main()
