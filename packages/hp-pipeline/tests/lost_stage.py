"""Ranks of a pipeline, one of which ends in the middle of a step; see `test_lost_ranks.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hp_platform
from hp_pipeline import PipelineStage, Schedule1F1B
from hp_platform import LostRankError


def main(connection: Any, rank: int, path: str, environment: dict[str, str]) -> None:
    """Rank 1 of 3 ends in its second forward of the second run; the others say what they were told."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, 3)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=3)
    calls = 0
    layer = nn.Linear(4, 4)

    def work(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 6:
            os._exit(3)
        return layer(x).sum() if rank == 2 else layer(x)

    schedule = Schedule1F1B(PipelineStage(work, rank, 3, device="cpu"), 4)
    x = torch.ones(4, 4)
    told: Any = None
    try:
        for _ in range(2):
            schedule.run(x)
    except LostRankError as error:
        told = error.ranks
    connection.send(told)
    hp_platform.destroy_process_group()
