"""A rank that is killed is named by those that wait for its signal, and nothing of symmetric memory is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import symmetric_ranks

from hp_testing.pools.processes import rank_processes

pytestmark = pytest.mark.not_on("torch-cuda", "torch-npu", "torch-npu-sim", reason="tensors are on the host here")

PRELOAD = ["hp_testing.torch.ranks", "hp_onesided.opening", "symmetric_ranks"]
RANKS = symmetric_ranks.RANKS
MIB = 1 << 20


@pytest.mark.parametrize("core", ["native", "python"])
def test_a_killed_rank_is_named_by_those_that_wait(tmp_path, core):
    arguments = str(tmp_path / "store"), core, 4096
    with rank_processes(symmetric_ranks.main, RANKS, *arguments, preload=PRELOAD) as (_, connections):
        pids = [connection.recv() for connection in connections]
        os.kill(pids[1], signal.SIGKILL)
        for rank in (0, 2):
            assert connections[rank].poll(240.0)
            kind, ranks, text, grown = connections[rank].recv()
            assert (kind, ranks, grown) == ("LostRankError", (1,), 0)
            (awaited,) = re.findall("^rank 1 was lost: its process has ended, while (.*) was waited for$", text)
            of_others = ["the all_reduce of rank 0", "the all_reduce of rank 1"]
            assert awaited in (of_others if rank == 2 else ["signal 0 of rank 2"])


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.thorough)])
def test_nothing_is_left_when_all_ranks_are_killed(tmp_path, kills):
    """What one run leaves would grow with the kills: tens of MiB each."""
    nbytes = 32 * MIB
    before, files = shared_memory(), len(os.listdir("/proc/self/fd"))
    for number in range(kills):
        arguments = str(tmp_path / f"store{number}"), "native", nbytes
        with rank_processes(symmetric_ranks.main, RANKS, *arguments, preload=PRELOAD) as (processes, connections):
            for pid in [connection.recv() for connection in connections]:
                os.kill(pid, signal.SIGKILL)
            for process in processes:
                process.join()
        if number == 0:
            files = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == files
    assert shared_memory() - before < kills * RANKS * nbytes // 2
    assert not any("onesided" in name for name in os.listdir("/dev/shm"))


def shared_memory() -> int:
    """Get the machine's shared memory, in bytes; other programs have some, too."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))
