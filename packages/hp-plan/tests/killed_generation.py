"""Ranks of which one is killed while it generates; see `test_killed_generation.py`."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

import hp_platform
from hp_plan import ParallelPlan, apply, build_model, generating
from hp_testing import device_type
from hp_testing.torch.ranks import join

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "eos_token_id": None}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class Victim:
    """Stops no text; kills its process at the third token."""

    def __init__(self, doomed: bool) -> None:
        self.doomed = doomed

    def __call__(self, ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        if self.doomed and ids.shape[1] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def generate(axis: str, memory: int | None, doomed: bool) -> None:
    """Generate with a model under a plan of two ranks, and then take a step."""
    mesh = {axis: 2}
    styles = {"styles": "auto"} if axis == "tp" else {}
    table: dict[str, Any] = {"model": {"config": "LlamaConfig", "overrides": SIZES}, "mesh": mesh, **styles}
    plan = ParallelPlan.from_dict({**table, "data": {"sequence_length": 16}})
    model: Any = apply(build_model(plan, device=device_type()), plan)
    ids = torch.arange(1, 9, device=device_type()).view(2, 4)
    with generating(model, memory=memory):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [Victim(doomed)]}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    model(ids, labels=ids).loss.backward()


def main(
    connection: Connection, rank: int, ranks: int, doomed: int, axis: str, memory: int | None, environment: Any
) -> None:
    """A rank; it sends how it ended."""
    os.environ.update(environment)
    join(rank, ranks, connection.send, connection.recv)
    try:
        generate(axis, memory, rank == doomed)
    except BaseException as error:
        connection.send((type(error).__name__, getattr(error, "ranks", None), str(error)))
        hp_platform.destroy_process_group()
        raise
    connection.send(("nothing", None, "the step came to its end"))
