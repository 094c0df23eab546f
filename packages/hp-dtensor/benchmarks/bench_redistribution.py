"""Moving between layouts, against torch's DTensor and against the raw collective.

    python packages/hp-dtensor/benchmarks/bench_redistribution.py [--rounds 30]

Host time: all candidates in one process, interleaved, medians of CPU time, on one thread, with a fake process group of
8 ranks (which has no exchange of pieces of another shape). Data: Shard(0) to Shard(1) on two gloo ranks, wall time of
rank 0, each round running every candidate.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from bench_dtensor import RANKS, interleave, table
from torch.distributed import tensor as peer
from torch.distributed.device_mesh import init_device_mesh as peer_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_dtensor as hp
from hp_testing import close_pools, run_ranks

SIDES = {"16 MB": 2048, "4 KB": 32}


def _placed(library: Any, text: str) -> Any:
    return {"R": library.Replicate(), "P": library.Partial(), "S0": library.Shard(0), "S1": library.Shard(1)}[text]


def moves(library: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """What is timed, on one library."""
    local = torch.randn(4, 16)

    def made(text: str) -> Any:
        return library.DTensor.from_local(local, mesh, [_placed(library, text)], run_check=False)

    def move(source: str, target: str) -> Callable[[], Any]:
        x, placements = made(source), [_placed(library, target)]
        return lambda: x.redistribute(mesh, placements)

    x, shard = made("S0"), [_placed(library, "S0")]
    return {
        "from_local": lambda: library.DTensor.from_local(local, mesh, shard, run_check=False),
        "to_local": x.to_local,
        "redistribute, nothing to do": move("S0", "S0"),
        "Partial to Replicate": move("P", "R"),
        "Partial to Shard(0)": move("P", "S0"),
        "Replicate to Shard(0)": move("R", "S0"),
        "Shard(0) to Replicate": move("S0", "R"),
    }


def reads(library: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Methods that programs call all the time."""
    x = library.DTensor.from_local(torch.randn(4, 16), mesh, [_placed(library, "S0")], run_check=False)
    return {
        "x.shape": lambda: x.shape,
        "x.size(0)": lambda: x.size(0),
        "x.dim()": lambda: x.dim(),
        "x.dtype": lambda: x.dtype,
        "x.device": lambda: x.device,
        "x.requires_grad": lambda: x.requires_grad,
        "x.is_floating_point()": lambda: x.is_floating_point(),
        "x.detach()": lambda: x.detach(),
    }


def new_shapes(library: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Operations on a shape that was never seen."""
    sizes: Iterator[int] = itertools.count(8)

    def fresh(*placements: str) -> list[Any]:
        n = next(sizes)
        shapes = ((2, n), (n, 8)) if len(placements) > 1 and placements[1] == "R" else ((2, n), (2, n))
        pairs = zip(shapes, placements, strict=False)
        return [
            library.DTensor.from_local(torch.zeros(s), mesh, [_placed(library, p)], run_check=False) for s, p in pairs
        ]

    def add() -> Any:
        a, b = fresh("S0", "S0")
        return a + b

    def matmul() -> Any:
        a, b = fresh("S0", "R")
        return a @ b

    def sum_() -> Any:
        return fresh("S0")[0].sum(-1)

    return {"add": add, "matmul": matmul, "sum": sum_}


def bench_host(title: str, cases: Callable[[Any, Any], dict[str, Callable[[], Any]]], rounds: int) -> None:
    ours = cases(hp, hp.init_device_mesh("cpu", (RANKS,), ("tp",)))
    theirs = cases(peer, peer_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
    rows = []
    for name in ours:
        made = interleave({"torch": theirs[name], "ours": ours[name]}, rounds)
        rows.append([name, made["torch"], made["ours"], made["ours"] / made["torch"]])
    table(f"{title}, host microseconds", ["", "torch's", "ours", "ratio"], rows)


def exchange(side: int, rounds: int) -> dict[str, float] | None:
    """Shard(0) to Shard(1) of side x side numbers, milliseconds; on rank 0 the medians."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = dist.get_world_size()
    local = torch.randn(side // world, side)
    mesh, theirs_mesh = hp.init_device_mesh("cpu", (world,)), peer_mesh("cpu", (world,))
    ours = hp.DTensor.from_local(local, mesh, [hp.Shard(0)])
    theirs = peer.DTensor.from_local(local, theirs_mesh, [peer.Shard(0)], run_check=False)
    pieces = local.reshape(-1).clone()
    received = torch.empty_like(pieces)
    runs: dict[str, Callable[[], Any]] = {
        "all_to_all_single alone": lambda: dist.all_to_all_single(received, pieces),
        "torch's redistribute": lambda: theirs.redistribute(theirs_mesh, [peer.Shard(1)]),
        "our redistribute": lambda: ours.redistribute(mesh, [hp.Shard(1)]),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            out = run()
            if hasattr(out, "to_local"):
                out.to_local().sum().item()  # torch's is waited for at its first use
            else:
                received.sum().item()
            if round_ > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()} if dist.get_rank() == 0 else None


def bench_data(rounds: int) -> None:
    for size, side in SIDES.items():
        made = run_ranks(2, exchange, side, rounds if side > 100 else 20 * rounds, timeout=300.0)[0]
        base = made["all_to_all_single alone"]
        table(
            f"{size}, Shard(0) to Shard(1), two gloo ranks, milliseconds",
            ["", "time", "to the raw collective"],
            [[name, value, value / base] for name, value in made.items()],
        )
    close_pools()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each table; default 30")
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores,"
        " one thread"
    )
    bench_data(rounds)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    bench_host("Moving between layouts", moves, rounds)
    bench_host("Reading", reads, rounds)
    bench_host("A shape that was never seen", new_shapes, rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
