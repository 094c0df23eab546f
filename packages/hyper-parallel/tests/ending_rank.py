"""Two ranks, of which the first raises at the end of its work; see `test_worker.py`."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_plan import ModelSection, ParallelPlan
from hyper_parallel import worker
from hyper_parallel.launching.launch import Job


def main(connection: Any, rank: int, folder: str, environment: dict[str, str]) -> None:
    """Rank 0 can't write a file; rank 1 has come to the last barrier, and says what it was told."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    worker._PATIENCE = 0.0
    options: dict[str, Any] = {"store": dist.FileStore(f"{folder}/store", 2), "rank": rank, "world_size": 2}
    hp_platform.init_process_group = functools.partial(hp_platform.init_process_group, "gloo", **options)
    job = Job(ParallelPlan(model=ModelSection(config="Qwen3Config")), flights=Path(folder))
    try:
        with worker._rank(job):
            if rank == 0:
                raise OSError("no space left for loss.png")
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    connection.recv()  # all have said it
