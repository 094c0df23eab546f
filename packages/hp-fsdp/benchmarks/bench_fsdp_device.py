"""fully_shard against FSDP2 and against no wrapping on one accelerator: step time, peak memory, a trace.

One rank of the device's own backend (nccl, hccl), a transformer of 1.1 billion parameters, computed in bfloat16 with
float32 weights and AdamW. Without an accelerator it says so and measures nothing, unless `--device cpu` is asked for.

python packages/hp-fsdp/benchmarks/bench_fsdp_device.py [--device cpu] [--hidden N] [--layers N] [--trace PATH]
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import bench_fsdp

KINDS = ("ours", "torch", "none")


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    """The model, sharded by ``kind`` with computation and communication in bfloat16."""
    if kind == "ours":
        from hp_fsdp import MixedPrecisionPolicy, fully_shard
    elif kind == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        return model
    wrap = functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    for block in model.blocks:
        wrap(block)
    return wrap(model)


def step_of(kind: str, model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """A training step; without wrapping, autocast computes in bfloat16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(tokens.device.type, torch.bfloat16, enabled=kind == "none")

    def step() -> None:
        with autocast:
            output = model(tokens)
        F.cross_entropy(output.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(kind: str, arguments: argparse.Namespace, devices: Any) -> tuple[list[float], int]:
    """Seconds of each step, and peak bytes on the device over all of them."""
    device = devices.current_device() if arguments.device != "cpu" else torch.device("cpu")
    torch.manual_seed(0)
    with torch.device(device):
        bench_fsdp.LAYERS = arguments.layers
        model = wrapped(kind, bench_fsdp.Model(arguments.hidden))
        tokens = torch.randint(bench_fsdp.VOCABULARY, (arguments.batch, arguments.length))
    step = step_of(kind, model, tokens)
    for _ in range(3):
        step()
    devices.synchronize()
    devices.reset_peak_memory()
    seconds = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        step()
        devices.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = devices.peak_memory()
    if arguments.trace and kind == "ours":
        with torch.profiler.profile() as profile:
            step()
            devices.synchronize()
        profile.export_chrome_trace(arguments.trace)
    return seconds, peak


def main() -> None:
    from hp_platform import get_platform, init_process_group

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu",), help="measure on the CPU (default: the accelerator)")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size (default: 2048)")
    parser.add_argument("--layers", type=int, default=22, help="blocks (default: 22)")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: 4)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each (default: 1024)")
    parser.add_argument("--repeats", type=int, default=10, help="measured steps, two turns of each kind (default: 10)")
    parser.add_argument("--trace", help="where to write a chrome trace of one step of ours")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    devices = get_platform().devices
    if devices.kind == "cpu" and arguments.device != "cpu":
        print("no accelerator on this machine: nothing was measured (--device cpu measures on the CPU)")
        return
    store = dist.HashStore()
    init_process_group(store=store, rank=0, world_size=1)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peaks: dict[str, int] = {}
    for _ in range(2):
        for kind in KINDS:
            measured, peaks[kind] = measure(kind, arguments, devices)
            seconds[kind] += measured
            gc.collect()
    parameters = sum(p.numel() for p in _meta_model(arguments).parameters())
    print(f"torch {torch.__version__}, {_name(devices)}, {parameters / 1e9:.2f} billion parameters,", end=" ")
    print(f"{arguments.batch} x {arguments.length} tokens, medians of {2 * arguments.repeats}")
    print(f"{'':16}{'ours':>10}{'FSDP2':>10}{'none':>10}{'/FSDP2':>8}{'/none':>8}")
    _show("step, ms", {kind: statistics.median(values) * 1e3 for kind, values in seconds.items()})
    _show("peak, MB", {kind: peak / 2**20 for kind, peak in peaks.items()})
    dist.destroy_process_group()


def _meta_model(arguments: argparse.Namespace) -> nn.Module:
    with torch.device("meta"):
        return bench_fsdp.Model(arguments.hidden)


def _name(devices: Any) -> str:
    return "CPU" if devices.kind == "cpu" else devices.device_module().get_device_name()


def _show(what: str, row: dict[str, float]) -> None:
    cells = "".join(f"{row[kind]:10.2f}" for kind in KINDS)
    print(f"{what:16}{cells}{row['ours'] / row['torch']:8.2f}{row['ours'] / row['none']:8.2f}")


if __name__ == "__main__":
    main()
