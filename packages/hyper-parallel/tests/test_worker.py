"""The program of a rank, whose end the others hear of."""

from __future__ import annotations

import ending_rank
import pytest

from hp_testing.pools.processes import rank_processes

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


def test_an_error_of_one_rank_reaches_the_others_in_the_last_barrier(tmp_path):
    with rank_processes(ending_rank.main, 2, str(tmp_path)) as (_, connections):
        told = []
        for connection in connections:
            assert connection.poll(240.0)
            told.append(connection.recv())
        for connection in connections:
            connection.send("all have said it")
    assert told[0] == "OSError: no space left for loss.png"
    assert told[1].startswith("FailedRankError: rank 0 gave up: OSError: no space left for loss.png. The ranks can't")
