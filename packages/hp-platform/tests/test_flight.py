"""Flight recorders of ranks, read from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np

from hp_platform import get_platform
from hp_platform.failures import flight
from hp_platform.failures.flight import Channel, beating, flight_stack, note_step, read_flight, record_flight
from hp_testing import as_tensor, on_ranks


@contextmanager
def recorded(folder):
    """Note the collectives of a block."""
    recorder = record_flight(folder, get_platform().groups.rank())
    try:
        yield
    finally:
        flight.recorder = None
        recorder.close()


@on_ranks(2)
def test_collectives_are_numbered_on_their_channels(tmp_path):
    platform = get_platform()
    rank, group = platform.groups.rank(), platform.groups.default_group()
    tensor = as_tensor(np.ones(4, np.float32))
    with recorded(tmp_path):
        for _ in range(70):
            platform.collectives.all_reduce(tensor, "max", group=group)
        pending = platform.collectives.all_reduce(tensor, "max", group=group, async_op=True)
        if rank == 0:
            platform.collectives.send(tensor, 1, group=group)
        else:
            platform.collectives.recv(tensor, 0, group=group)
        pending.wait()
        note_step("step", 3)
    read = read_flight(tmp_path, rank)
    assert read is not None
    assert (read.rank, read.pid, read.phase, read.step, read.waiting) == (rank, os.getpid(), "step", 3, None)
    assert read.begun == {Channel((0, 1)): 71, Channel((0, 1), messages=True): 1}
    assert len(read.last) == 64
    assert [(each.kind, each.number, each.bytes) for each in read.last[-2:]] == [
        ("all_reduce", 71, 16),
        ("send" if rank == 0 else "recv", 1, 16),
    ]
    assert read_flight(tmp_path, 2) is None


class _Looks:
    """Work that looks at the notes while it is waited for."""

    def __init__(self, folder):
        self.folder, self.seen = folder, None

    def wait(self):
        self.seen = read_flight(self.folder, 0)


@on_ranks(1)
def test_a_rank_that_waits_says_in_what(tmp_path):
    with recorded(tmp_path):
        assert flight.recorder is not None
        group = get_platform().groups.default_group()
        entry = flight.recorder.begin("all_gather", 8, group)
        work = _Looks(tmp_path)
        handle = flight.recorder.pending(work, entry)
        flight.recorder.begin("barrier", 0, group)
        flight.recorder.end()
        handle.wait()
    assert work.seen is not None and work.seen.waiting == (Channel((0,)), 1)
    after = read_flight(tmp_path, 0)
    assert after is not None and after.waiting is None


@on_ranks(1)
def test_the_stack_is_written_at_a_signal(tmp_path):
    with recorded(tmp_path):
        assert flight_stack(tmp_path, 0) == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert "test_the_stack_is_written_at_a_signal" in flight_stack(tmp_path, 0).splitlines()[0]


@on_ranks(1)
def test_threads_that_run_while_the_stack_is_written_do_no_harm(tmp_path):
    ended = threading.Event()
    sends = f"import os, time\nfor _ in range(50): os.kill({os.getpid()}, {int(signal.SIGUSR1)}); time.sleep(0.002)"

    def calls(depth):
        return depth and calls(depth - 1)

    def runs():
        while not ended.is_set():
            calls(30)
            eval("sorted(range(50), key=lambda each: -each)")

    thread = threading.Thread(target=runs)
    with recorded(tmp_path):
        thread.start()
        try:
            subprocess.run([sys.executable, "-c", sends], check=True)
        finally:
            ended.set()
            thread.join()
        assert "runs" not in flight_stack(tmp_path, 0)
        assert "test_threads_that_run" in flight_stack(tmp_path, 0)


@on_ranks(1)
def test_beats_are_moves_of_a_rank_that_does_nothing_else(tmp_path):
    page, deadline = tmp_path / "rank-0.flight", time.monotonic() + 60
    with recorded(tmp_path):
        before = page.read_bytes()
        with beating(0.01):
            while page.read_bytes() == before:
                assert time.monotonic() < deadline
        after = page.read_bytes()
        assert page.read_bytes() == after
    assert read_flight(tmp_path, 0) is not None
