"""Whether anything grows: steps of a sharded model on gloo ranks, its memory and objects printed on the way.

    python packages/hp-fsdp/benchmarks/soak_fsdp.py [--steps 1000] [--ranks 2] [--deterministic]

Two micro-batches, a clipped gradient norm and AdamW a step. It fails if the bytes of all live tensors after a step
ever differ.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import warnings
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

import hp_platform
from hp_fsdp import clip_grad_norm_, fully_shard

WIDTH, BLOCKS, ROWS, WARM = 32, 4, 8, 3


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def resident() -> float:
    """MB of this process in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def live_bytes() -> int:
    """Bytes of the storages of all live tensors, each once; of those made after `gc.freeze`."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def settled(expected: int) -> int:
    """The bytes of live tensors; gloo's threads let go of a collective's tensors a moment after it is over."""
    for _ in range(100):
        live = live_bytes()
        if live == expected:
            break
        time.sleep(0.005)
    return live


def soak(connection: Connection, rank: int, options: argparse.Namespace) -> None:
    """Trains on one rank; sends the port that it got, then the table's rows or what differs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port = 0 if rank == 0 else connection.recv()
    store = dist.TCPStore("127.0.0.1", port, options.ranks, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        connection.send(store.port)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    torch.optim.AdamW([torch.zeros(1)])  # the first one imports 100,000 objects
    gc.collect()
    gc.freeze()
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, deterministic=options.deterministic)
    fully_shard(model, deterministic=options.deterministic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows, expected = [], 0
    for step in range(1, options.steps + 1):
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        if step == WARM:
            time.sleep(0.1)
            expected = live_bytes()
        live = settled(expected) if step >= WARM else 0
        if step > WARM and live != expected:
            connection.send(
                f"rank {rank}: {live:,} bytes of tensors live after step {step}, {expected:,} after step {WARM}"
            )
            sys.exit(1)
        if step % max(options.steps // 10, 1) == 0:
            rows.append((step, resident(), live, len(gc.get_objects())))
    connection.send(rows)
    hp_platform.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="default 1000")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--deterministic", action="store_true", help="fully_shard(deterministic=True)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    begin = time.monotonic()
    for rank in range(options.ranks):
        here, there = context.Pipe()
        processes.append(context.Process(target=soak, args=(there, rank, options)))
        processes[-1].start()
        there.close()
        connections.append(here)
    port = connections[0].recv()
    for connection in connections[1:]:
        connection.send(port)
    failed = False
    for rank, connection in enumerate(connections):
        try:
            rows = connection.recv()
        except EOFError:
            rows = f"rank {rank} ended without a word"
        if isinstance(rows, str):
            failed = True
            print(rows)
            continue
        print(f"rank {rank}\n{'steps':>8}{'resident MB':>14}{'tensor bytes':>15}{'objects':>10}")
        for step, megabytes, live, objects in rows:
            print(f"{step:>8}{megabytes:>14.1f}{live:>15,}{objects:>10,}")
    for process in processes:
        process.join()
        failed = failed or process.exitcode != 0
    print(
        f"{options.steps} steps on {options.ranks} ranks, {time.monotonic() - begin:.0f} s:",
        "GREW" if failed else "nothing grew",
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
