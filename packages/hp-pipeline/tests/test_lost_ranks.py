"""A rank whose process ends in the middle of a step is named by all others."""

from __future__ import annotations

import failing_stage
import lost_stage
import pytest

from hp_testing.pools import target
from hp_testing.pools.processes import rank_processes

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]


def test_a_rank_that_ends(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    with rank_processes(lost_stage.main, 3, str(tmp_path / "store")) as (processes, connections):
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            assert connections[rank].recv() == (1,)
        for process in processes:
            process.join(30.0)
        assert [process.exitcode for process in processes] == [0, 3, 0]


@pytest.mark.parametrize(("failing", "step"), [pytest.param(1, "0F2", marks=pytest.mark.thorough), (3, "1F2")])
def test_a_stage_that_raises_where_its_other_rank_communicates_ends_all_with_its_error(tmp_path, failing, step):
    if lacking := target.missing():
        pytest.skip(lacking)
    place = f"rank {failing}"
    with rank_processes(failing_stage.main, 4, str(tmp_path / "store"), place) as (processes, connections):
        for rank in range(4):
            assert connections[rank].poll(240.0), f"rank {rank} heard nothing"
            text, cause = connections[rank].recv()
            assert text.startswith("A stage failed; gradients are incomplete")
            assert text.endswith(f"start the processes again; rank {failing} at {step}: ArithmeticError: too hot.")
            assert (cause == "ArithmeticError('too hot')") == (rank == failing)
            assert connections[rank].poll(240.0)
            assert connections[rank].recv().startswith(f"rank {failing} gave up: rank {failing} at {step}: ")
        for rank in range(4):
            connections[rank].send("all have heard")
        for process in processes:
            process.join(30.0)
        assert [process.exitcode for process in processes] == [0] * 4


def test_processes_that_are_started_again_run(tmp_path):
    if lacking := target.missing():
        pytest.skip(lacking)
    with rank_processes(failing_stage.main, 4, str(tmp_path / "again"), "no rank") as (processes, connections):
        assert all(connection.poll(240.0) for connection in connections)
        first, *others = (connection.recv() for connection in connections[::-1])
        assert others == [first, [], []] and len(first) == 4
        for connection in connections:
            connection.send("all have heard")
        for process in processes:
            process.join(30.0)
        assert [process.exitcode for process in processes] == [0] * 4
