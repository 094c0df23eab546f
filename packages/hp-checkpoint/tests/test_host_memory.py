"""Memory that ranks share where one of them fails while they open it."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from hp_checkpoint.host_memory import HostMemory
from hp_platform import LostRankError


class Thread(threading.Thread):
    """A rank of two, in a thread of one process; it fails in a gather of a number."""

    size = 2

    def __init__(self, rank, records, barrier, failing):
        super().__init__(daemon=True)
        self.rank, self.leader = rank, 0
        self.records, self.barrier, self.failing, self.gathers, self.error = records, barrier, failing, 0, None

    def gather(self, record):
        self.records[self.rank] = record
        self.barrier.wait(20)
        records = [self.records[rank] for rank in range(self.size)]
        self.barrier.wait(20)
        self.gathers += 1
        if self.gathers == self.failing:
            raise LostRankError("rank 2 is lost", (2,))
        return records

    def run(self):
        try:
            memory = HostMemory(4096, self)
            memory.memory_of(1 - self.rank, 0)
            memory.close()
        except LostRankError as error:
            self.error = error.with_traceback(None)


def opened():
    """List pipes and handles of processes; the listing has a descriptor of its own."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(each for each in targets if any(kind in each for kind in ("memfd:", "pipe:", "pidfd")))


@pytest.mark.parametrize("failing", [(None, 2), (1, 1), (2, 2)])
def test_a_failing_rank_is_not_waited_for(failing):
    """Of a lost rank some hear earlier than others; the first ones offer nothing, and keep nothing open."""
    before = opened()
    records, barrier = {}, threading.Barrier(2)
    threads = [Thread(rank, records, barrier, failing[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert [thread.error is not None for thread in threads] == [each is not None for each in failing]
    assert opened() == before
