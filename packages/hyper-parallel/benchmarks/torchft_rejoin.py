"""Replicas that torchft's manager trains over gloo, one of which is killed and another takes its place.

`bench_recovery.py torchft` measures them. This file is the program of a replica, too:

    python torchft_rejoin.py REPLICA LIGHTHOUSE STEPS [DIES]

It imports and builds its model, waits for a line on stdin, and prints each step that the replicas have committed: its
number, how many took part, and when. With DIES it ends by SIGKILL in the backward of that step, and prints when.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 4,
}


def tell(**values: float) -> None:
    print(json.dumps({**values, "at": time.time()}), flush=True)


def check() -> None:
    """Exit by name where torchft is not installed."""
    if find_spec("torchft") is None:
        sys.exit("bench_recovery.py torchft measures torchft, which is not installed: pip install torchft")


def rejoined(step: int) -> tuple[float, float]:
    """Return seconds from the kill of one of two replicas until the other has committed a step, and until both have.

    The replica that takes its place has imported everything and built its model before, as a spare process has.

    Args:
        step: in which the replica is killed.

    Raises:
        RuntimeError: a replica ended.
    """
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    address, more = lighthouse.address(), str(10**6)
    with contextlib.ExitStack() as stack:
        stays, dies, comes = (
            stack.enter_context(_replica(*arguments))
            for arguments in (("0", address, more), ("1", address, more, str(step)), ("1", address, more))
        )
        for each in (stays, dies, comes):
            next(_told(each))
        for each in (stays, dies):
            _go(each)
        killed = next(told["at"] for told in _told(dies) if "killed" in told)
        dies.wait()
        _go(comes)
        later = (told for told in _told(stays) if told["at"] > killed)
        first = next(later)
        both = next(told for told in later if told["participants"] == 2)
    return first["at"] - killed, both["at"] - killed


def _told(process: subprocess.Popen[str]) -> Iterator[dict[str, float]]:
    """List what a replica prints."""
    assert process.stdout is not None
    yield from map(json.loads, process.stdout)
    raise RuntimeError(f"a replica of torchft ended: {process.args}")


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@contextlib.contextmanager
def _replica(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train(replica: str, lighthouse: str, steps: int, dies: int | None) -> None:
    """Train as a replica, until it is ended or has taken so many steps."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    tell(ready=1)
    sys.stdin.readline()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        own.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": own.state_dict()},
        min_replica_size=1,
        timeout=limit,
        replica_id=f"replica_{replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
    )
    optimizer = Optimizer(manager, own)
    tokens = torch.randint(0, 256, (6, 16), generator=torch.Generator().manual_seed(int(replica)))

    def kill(gradient: Any) -> None:
        if manager.current_step() + 1 == dies:
            tell(killed=1)
            os.kill(os.getpid(), signal.SIGKILL)

    model.model.embed_tokens.weight.register_hook(kill)
    while manager.current_step() < steps:
        before = manager.current_step()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        manager.allreduce(flat).wait()  # its DistributedDataParallel asserts where a replica is lost in a reduction
        for each, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            each.copy_(part.view_as(each))
        optimizer.step()
        if manager.current_step() > before:
            tell(step=manager.current_step(), participants=manager.num_participants())
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
