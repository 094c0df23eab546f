"""Ranks of a pipeline, one of which is killed while they generate; see `test_generating_stages.py`."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import hp_platform
from hp_plan import ParallelPlan, apply, build_model, generating
from hp_platform import LostRankError

SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "eos_token_id": None}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}


def main(connection: Any, rank: int, path: str, doomed: int, environment: dict[str, str]) -> None:
    """Generate; the doomed rank ends with its third token, and the others say what they were told."""
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    hp_platform.init_process_group("gloo", store=store, rank=rank, world_size=2)
    plan = ParallelPlan.from_dict({"model": {"config": "LlamaConfig", "overrides": SIZES}, "mesh": {"pp": 2}})
    model = apply(build_model(plan), plan)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        if rank == doomed and forwards == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    (block,) = [module for name, module in model.named_modules() if name.endswith(f"layers.{rank}")]
    block.register_forward_hook(count)
    told: Any = None
    try:
        with generating(model):
            ids = torch.ones(2, 3, dtype=torch.int64)
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    except LostRankError as error:
        told = error.ranks, forwards
    connection.send(told)
    hp_platform.destroy_process_group()
