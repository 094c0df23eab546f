"""A watch that ends what hangs."""

from __future__ import annotations

import signal

import hanging_ranks
import pytest

from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes


def test_ranks_that_wait_for_each_other_are_ended_after_a_report(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    with rank_processes(hanging_ranks.main, 3, str(tmp_path)) as (processes, connections):
        assert connections[2].poll(240.0)
        assert set(connections[2].recv()) <= {0, 1}
        for process in processes:
            process.join(240.0)
        assert [process.exitcode for process in processes] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    text = "".join((tmp_path / f"output-{rank}").read_text() for rank in range(3))
    assert "(watch_hangs): ranks 0, 1 wait for each other: they issue collectives in different orders\n" in text
    assert "\nrank 0 waits in barrier number 1 over ranks [0, 1] (0 bytes), at " in text
    assert "\nrank 1 waits in barrier number 1 over ranks [0, 1] (group 2 of these ranks, 0 bytes), at " in text
    assert "The processes of ranks [0, 1] are killed now.\n" in text
