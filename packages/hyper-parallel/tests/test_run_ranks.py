"""`run_ranks`: functions on ranks of their own, as a notebook or a test starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform import get_platform
from hyper_parallel import run_ranks
from hyper_parallel.launching.launch import RankFailure

pytestmark = pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it")
FACTOR = 3.0


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MS_ROLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPER_PARALLEL_DEVICE", "cpu")
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", get_platform().name)


def total(value: float, *, times: int = 1) -> tuple[int, list[float]]:
    """Sum over the ranks, by a function and a constant of this module, which no other process finds."""
    platform = get_platform()
    print(f"here is {platform.groups.rank()}")
    numbers = np.full(2, value * FACTOR * (platform.groups.rank() + 1), "float32")
    if platform.name == "torch":
        import torch

        tensor: Any = torch.from_numpy(numbers)
    else:
        import mindspore

        tensor = mindspore.Tensor(numbers)
    for _ in range(times):
        platform.collectives.all_reduce(tensor, group=platform.groups.default_group())
    return platform.groups.rank(), [float(each) for each in tensor]


def test_results_and_prints_of_all_ranks(capsys):
    assert run_ranks(total, 2, 2.0, times=2) == [(0, [36.0, 36.0]), (1, [36.0, 36.0])]
    out, _ = capsys.readouterr()
    assert {"0: here is 0", "1: here is 1"} <= set(out.splitlines())


@pytest.mark.framework("torch")
def test_the_readmes_program(capsys):
    readme = Path(__file__).parents[1] / "README.md"
    (program,) = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    losses = json.loads(capsys.readouterr().out)
    assert len(losses) == 4 and losses[0] == losses[1] and 0 < max(losses) < 2


def fail(how: str) -> object:
    rank = get_platform().groups.rank()
    if rank == 1 and how == "raise":
        raise LookupError("nothing is there")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "return":
        total(1.0)  # in vain
    return total


@pytest.mark.framework("torch")
def test_what_a_rank_raised_is_raised_here():
    with pytest.raises(LookupError, match="nothing is there") as caught:
        run_ranks(fail, 2, "raise")
    (note,) = caught.value.__notes__
    assert note.startswith("It was raised on rank 1:\nTraceback") and "in fail" in note
    with pytest.raises(RankFailure, match=r"^rank 1 failed first; .*\nkilled by SIGKILL \(process"):
        run_ranks(fail, 2, "kill")
    with pytest.raises(RankFailure, match="its result, a .*, can't be sent .*Return plain tensors and values"):
        run_ranks(lambda: (_ for _ in ()), 1)
    with pytest.raises(TypeError, match=r"a DTensor of shape \(4,\) is returned, .* return full_tensor\(\)"):
        run_ranks(sharded_state, 2)
    states = run_ranks(lambda: sharded_state("full_tensor", "to_local"), 2)
    assert [[weight.tolist() for weight in state["weights"]] for state in states] == [[[1.0] * 4, [1.0] * 2]] * 2


def sharded_state(*ways):
    import torch

    from hp_dtensor import Shard, distribute_tensor, init_device_mesh

    weight = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    return {"weights": [getattr(weight, way)() for way in ways] or [weight]}


def test_what_is_refused_before_ranks_start(monkeypatch):
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        run_ranks(fail, 0, "return")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="this process is a launcher's rank already"):
        run_ranks(fail, 2, "return")


WAITS = """
import os, signal, time
from hyper_parallel import run_ranks

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell's background job lacks

def wait():
    print("process", os.getpid(), flush=True)
    time.sleep(1e6)

run_ranks(wait, 2)  # no guard of __main__
"""


@pytest.mark.framework("torch")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_asked(number):
    with subprocess.Popen([sys.executable, "-u", "-c", WAITS], stdout=subprocess.PIPE, text=True) as asks:
        assert asks.stdout is not None
        ranks = [int(asks.stdout.readline().split()[-1]) for _ in range(2)]
        asks.send_signal(number)
        asks.stdout.read()
    while any(os.path.exists(f"/proc/{rank}") for rank in ranks):
        time.sleep(0.05)
    assert asks.returncode not in (0, None)
