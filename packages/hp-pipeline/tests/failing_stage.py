"""Two pipelines whose stages communicate, one rank of which raises; see `test_lost_ranks.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hp_platform
from hp_pipeline import PipelineError, PipelineStage, Schedule1F1B
from hp_platform import LostRankError, get_platform


def main(connection: Any, rank: int, path: str, place: str, environment: dict[str, str]) -> None:
    """Ranks 0 and 2, and 1 and 3, are pipelines; 0 and 1, and 2 and 3, are the two ranks of a stage.

    Rank 1 or 3 raises in the second run, in a collective's place; the others say what they were told. Where no rank
    raises, all send their losses.
    """
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, 4)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=4)
    groups, collectives = get_platform().groups, get_platform().collectives
    pipeline = groups.new_group([rank % 2, rank % 2 + 2])
    stage = groups.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
    torch.manual_seed(0)
    calls, layer = 0, nn.Linear(4, 4)

    def work(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7 and f"rank {rank}" == place:
            raise ArithmeticError("too hot")
        y = layer(x)
        collectives.all_reduce(y.detach().clone(), group=stage)
        return y.sum() if rank > 1 else y

    options: Any = {"group": pipeline, "peers": groups.default_group(), "patience": 0.5}
    schedule = Schedule1F1B(PipelineStage(work, rank // 2, 2, device="cpu"), 4, **options)
    x = torch.ones(4, 4)
    schedule.run(x)
    try:
        connection.send([loss.item() for loss in schedule.run(x)])
    except PipelineError as error:
        connection.send((str(error), repr(error.__cause__)))
    try:
        collectives.barrier()
    except LostRankError as error:
        connection.send(str(error))
    connection.recv()  # all have heard
    hp_platform.destroy_process_group()
