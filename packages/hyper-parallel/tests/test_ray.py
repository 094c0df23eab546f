"""The program of Ray Train, on two workers of its own; `nox -s "loops(ray)"` has Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="the workers ask for CPUs; nothing of the device in it"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs Ray: nox -s "loops(ray)"'),
]
LOOPS = Path(__file__).parents[3] / "examples" / "loops"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def losses(*words: str) -> list[str]:
    """Run a program by Python; get the losses that it prints."""
    own = {"HYPER_PARALLEL_DEVICE": "cpu", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line.startswith("losses:")]


def test_workers_of_ray_train_as_ranks_of_torchrun():
    got = losses(str(LOOPS / "ray_train.py"))
    assert len(got) == 1 and got == losses(*TORCHRUN, str(LOOPS / "plain.py"))
