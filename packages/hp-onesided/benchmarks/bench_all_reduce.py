"""All-reduces of ranks on one host, turn by turn: ours, gloo's, DeepSpeed's algorithm, and a copy, which is the limit.

    python packages/hp-onesided/benchmarks/bench_all_reduce.py
    python packages/hp-onesided/benchmarks/bench_all_reduce.py --ranks 4 --sizes 16M

Each line: gloo's wall time of a call (the slowest rank's median) and CPU time (of all ranks together), then the ratios
to them. DeepSpeed's algorithm is `spinning_all_reduce.cpp`, compiled for this processor. The limit is one copy of the
tensor by each rank, all at once: an all-reduce reads what others have written, and writes the result.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from bench_collectives import UNITS, group_of, measure, over_ranks

from hp_platform import destroy_process_group, get_platform, init_process_group
from hp_platform.communication import carriers

WAYS = ("gloo", "ours", "spinning", "copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4K", "256K", "1M", "16M"])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    sizes = [int(text[:-1]) * UNITS[text[-1]] for text in options.sizes]
    print("| ranks | bytes | gloo ms: wall, CPU | ours: wall, CPU | DeepSpeed's algorithm | a copy |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name("spinning_all_reduce.cpp"), str(Path(folder, "spinning.so"))
        subprocess.run(["g++", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", library], check=True)
        for ranks in options.ranks:
            store = str(Path(folder, f"store{ranks}"))
            multiprocessing.spawn(work, (ranks, store, library, sizes, options.repeats), nprocs=ranks)


def work(rank: int, ranks: int, store: str, library: str, sizes: list[int], repeats: int) -> None:
    """Measure on one rank, and print on the first."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    carriers.ENTRY_POINTS = ""  # each group gets its carrier here
    init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    gloo, ours = group_of("gloo", ranks), group_of("native", ranks)
    spinning = spinning_of(library, store + ".memory", rank, ranks)
    collectives = get_platform().collectives
    for size in sizes:
        tensor, other = torch.ones(size // 4), torch.empty(size // 4)
        calls: dict[str, Callable[[], Any]] = {
            "gloo": partial(collectives.all_reduce, other, group=gloo),
            "ours": partial(collectives.all_reduce, other, group=ours),
            "spinning": partial(spinning, other),
            "copy": partial(other.copy_, tensor),
        }
        other.fill_(rank + 1.0)
        spinning(other)
        assert other.eq(ranks * (ranks + 1) / 2).all(), "the peer's sum is right"
        other.zero_()
        own = over_ranks(*measure(calls, gloo, repeats))
        if rank == 0:
            wall, cpu = own["gloo"]
            ratios = [f"{own[way][0] / wall:.2f}, {own[way][1] / cpu:.2f}" for way in WAYS[1:]]
            print(f"| {ranks} | {size} | {wall * 1e3:.3f}, {cpu * 1e3:.3f} | {' | '.join(ratios)} |", flush=True)
    destroy_process_group()


def spinning_of(library: str, path: str, rank: int, ranks: int) -> Callable[[torch.Tensor], None]:
    """Return the peer's all-reduce over memory in a file that all ranks map."""
    core = ctypes.CDLL(library)
    core.bytes_of.restype, core.all_reduce.restype = ctypes.c_size_t, ctypes.c_long
    core.all_reduce.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 2, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
    nbytes = core.bytes_of(ranks)
    if rank == 0:
        with open(path, "wb") as file:
            file.truncate(nbytes)
    dist.barrier()
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), nbytes)
    first, done = ctypes.c_char.from_buffer(memory), 0  # keeps the memory mapped

    def all_reduce(tensor: torch.Tensor) -> None:
        nonlocal done
        done = core.all_reduce(ctypes.addressof(first), rank, ranks, tensor.data_ptr(), tensor.numel(), done)

    return all_reduce


if __name__ == "__main__":
    main()
