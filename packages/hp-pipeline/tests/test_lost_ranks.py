"""A rank whose process ends in the middle of a step is named by all others."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from hp_testing import target

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
import lost_stage

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


def test_a_rank_that_ends(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    context = multiprocessing.get_context("forkserver")
    processes, connections = [], []
    try:
        for rank in range(3):
            here, there = context.Pipe()
            args = (there, rank, str(tmp_path / "store"), dict(os.environ))
            processes.append(context.Process(target=lost_stage.main, args=args))
            processes[-1].start()
            there.close()
            connections.append(here)
        for rank in (0, 2):
            assert connections[rank].poll(60.0)
            assert connections[rank].recv() == (1,)
        for process in processes:
            process.join(30.0)
        assert [process.exitcode for process in processes] == [0, 3, 0]
    finally:
        for process, connection in zip(processes, connections):
            process.kill()
            process.join()
            connection.close()
