"""A rank that is killed or stopped is named by the others, and nothing of it is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import failing_ranks
import pytest

from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")


PRELOAD = ["hp_testing.torch.ranks", "hp_onesided.opening", "failing_ranks"]


@pytest.mark.parametrize("how", ["calls", "waits"])
def test_a_killed_rank_is_named(tmp_path, how):
    arguments = str(tmp_path / "store"), how, 600.0
    with rank_processes(failing_ranks.main, 3, *arguments, preload=PRELOAD) as (_, connections):
        pids = [connection.recv() for connection in connections]
        os.kill(pids[1], signal.SIGKILL)
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            kind, ranks, text, _ = connections[rank].recv()
            assert (kind, ranks) == ("LostRankError", (1,))
            assert text.startswith("rank 1 was lost: its process has ended")
            mapped = Path(f"/proc/{pids[rank]}/maps").read_text()
            assert mapped.count("/memfd:hp_onesided (deleted)") == 3  # without a name, it ends with the last process
    assert not any("onesided" in name for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize("how", ["calls", "waits"])
def test_a_rank_that_gives_up_is_named_with_its_error(tmp_path, how):
    arguments = str(tmp_path / "store"), how, 600.0
    with rank_processes(failing_ranks.main, 3, *arguments, preload=PRELOAD) as (_, connections):
        for connection in connections:
            connection.recv()
        connections[1].send("give up")
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            kind, ranks, text, _ = connections[rank].recv()
            assert (kind, ranks) == ("FailedRankError", ()) and text.startswith(
                "rank 1 gave up: ValueError: no such file"
            )


@pytest.mark.parametrize("how", ["calls", "waits"])
def test_a_stopped_rank_is_named(tmp_path, how):
    limit = 3.0
    arguments = str(tmp_path / "store"), how, limit
    with rank_processes(failing_ranks.main, 3, *arguments, preload=PRELOAD) as (_, connections):
        pids = [connection.recv() for connection in connections]
        os.kill(pids[1], signal.SIGSTOP)
        told = []
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            kind, _, text, seconds = connections[rank].recv()
            assert kind == "RuntimeError" and seconds >= limit
            told.append(text)
        # The first to give up names the one that is stopped, the other one that or the one that gave up.
        late = "hp_onesided: rank 1 did not come to the all_"
        assert any(text.startswith(late) and text.endswith("within 3 s; its process is stopped") for text in told)
        assert all("rank 1 did not come" in text or "has closed its connection" in text for text in told)
