"""Ranks of which one ends in the middle of a step; see `test_lost_rank.py`. On its own it is a program of a user's.

python lost_ranks.py RANK RANKS PORT DOOMED
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import Net, seeded
from torch import nn

import hp_dtensor
import hp_platform
from hp_fsdp import clip_grad_norm_, full_state_dict, fully_shard
from hp_testing import device_type

TIMEOUT = timedelta(seconds=60)
Act = Callable[[], None]


def join(rank: int, ranks: int, port: int, announce: Callable[[int], None]) -> None:
    """Makes the default group; rank 0 hosts the store and announces the port that it got."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    hp_platform.get_platform().devices.set_device(rank % hp_platform.get_platform().devices.count)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    if rank == 0:
        announce(store.port)
    hp_platform.init_process_group(store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)


def sharded(ranks: int, **options: Any) -> nn.Module:
    replicas = options.pop("replicas", 1)
    shape, names = ((replicas, ranks // replicas), ("replicate", "shard")) if replicas > 1 else ((ranks,), ("shard",))
    mesh = hp_dtensor.init_device_mesh(device_type(), shape, mesh_dim_names=names)
    model = seeded(Net, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    return fully_shard(model, mesh, **options)


def train(model: nn.Module, where: str, end: Act | None) -> None:
    """Two steps, and in a third one this rank ends, if it is to."""
    for step in range(3):
        ends = end if step == 2 else None
        handle = model.blocks[1].up.register_forward_hook(lambda *_, ends=ends: act(ends, where == "forward"))
        output = model(torch.randn(2, 5, device=device_type()))
        handle.remove()
        if where == "backward":
            model.blocks[1].last_output.register_hook(lambda grad, ends=ends: act(ends, True))
        output.square().mean().backward()
        act(ends, where == "clip_grad_norm_")
        clip_grad_norm_(model.parameters(), 1.0)
        descend(model)
        act(ends, where == "full_state_dict")
        full_state_dict(model)


def descend(model: nn.Module) -> None:
    """An optimizer's step, without the import of torch.optim, which takes seconds in each process."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def act(end: Act | None, here: bool) -> None:
    if end is not None and here:
        end()


def redistribute(ranks: int, end: Act | None) -> None:
    mesh = hp_dtensor.init_device_mesh(device_type(), (ranks,))
    tensor = hp_dtensor.distribute_tensor(torch.randn(8, 8), mesh, [hp_dtensor.Shard(0)])
    for step in range(9):
        act(end, step == 5)
        tensor = tensor.redistribute(placements=[hp_dtensor.Shard(1 - step % 2)])


def run(case: str, ranks: int, end: Act | None) -> None:
    """Runs a case on this rank.

    Args:
        case: where the rank ends: "forward", "backward", ..., and before it the options, as in "hsdp backward".
        ranks: how many there are.
        end: what ends this rank; None on all others.
    """
    *kind, where = case.split()
    if where == "redistribute":
        redistribute(ranks, end)
        return
    options: dict[str, Any] = {"hsdp": {"replicas": 2}, "deterministic": {"deterministic": True}}.get("".join(kind), {})
    model = sharded(ranks, **options)
    model.blocks[1].register_forward_hook(keep_output)
    train(model, where, end)


def keep_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    object.__setattr__(module, "last_output", output)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(connection: Connection, rank: int, ranks: int, case: str, doomed: int, environment: dict[str, str]) -> None:
    """A rank of `test_lost_rank`; it sends how its step ended."""
    os.environ.update(environment)
    port = 0 if rank == 0 else connection.recv()
    join(rank, ranks, port, connection.send)
    try:
        run(case, ranks, kill if rank == doomed else None)
    except BaseException as error:
        connection.send((type(error).__name__, getattr(error, "ranks", None), str(error)))
        hp_platform.destroy_process_group()  # as a program's `finally` does
        raise
    connection.send(("nothing", None, "the step came to its end"))


def fail() -> None:
    raise ValueError("this rank's data are bad")


if __name__ == "__main__":
    own, number, at, last = map(int, sys.argv[1:])
    join(own, number, at, lambda port: print(port, flush=True))
    run("forward", number, fail if own == last else None)
