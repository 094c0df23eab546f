"""A rank whose process ends in the middle of a step is named by all others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_testing import target
from hp_testing.processes import rank_processes

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports tests by their path
import lost_stage

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


def test_a_rank_that_ends(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    with rank_processes(lost_stage.main, 3, str(tmp_path / "store")) as (processes, connections):
        for rank in (0, 2):
            assert connections[rank].poll(60.0)
            assert connections[rank].recv() == (1,)
        for process in processes:
            process.join(30.0)
        assert [process.exitcode for process in processes] == [0, 3, 0]
