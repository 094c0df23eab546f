"""The watch over ranks: processes that note their collectives stand for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest

from hp_platform.failures import flight
from hyper_parallel.supervision.hanging import Watch

pytestmark = [pytest.mark.framework("torch"), pytest.mark.not_on("torch-npu-sim", reason="nothing of the device in it")]

LIMIT = 0.2
SPAWN = multiprocessing.get_context("spawn")


def note(folder, rank):
    """Begin a flight recorder whose groups have the ranks 0 and 1."""
    members = SimpleNamespace(groups=SimpleNamespace(members=lambda group: (0, 1)))
    flight.port = lambda: members
    return flight.FlightRecorder(folder, rank)


def waits(folder, rank):
    recorder = note(folder, rank)
    recorder.note("step", 2)
    recorder.begin("all_reduce", 64, "group")
    time.sleep(600)


def ends(folder, rank):
    note(folder, rank).note("step", 2)
    os._exit(0)


def is_stopped(folder, rank):
    recorder = note(folder, rank)
    recorder.note("step", 2)
    os.kill(os.getpid(), signal.SIGSTOP)
    recorder.note("end", 3)


def watched(folder, *works):
    processes = [SPAWN.Process(target=work, args=(folder, rank)) for rank, work in enumerate(works)]
    for process in processes:
        process.start()
    return processes


def until(done):
    deadline = time.monotonic() + 240
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_waits_for_a_rank_that_has_ended_is_ended(tmp_path):
    processes = watched(tmp_path, waits, ends)
    try:
        with Watch(tmp_path, 2, LIMIT, {"dp_shard": 2}) as watch:
            until(lambda: watch.failure is not None)
            processes[0].join(60)
        assert processes[0].exitcode == -signal.SIGKILL
        assert watch.failure is not None
        rank, text = watch.failure
        assert rank == 1
        assert "rank 1 has ended and has not come to all_reduce number 1 over ranks [0, 1] (axis dp_shard, 64" in text
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_rank_that_was_stopped_is_let_go_where_its_run_has_come_to_the_end(tmp_path):
    processes = watched(tmp_path, waits, is_stopped)
    try:
        with Watch(tmp_path, 2, LIMIT, {"dp_shard": 2}) as watch:
            until(lambda: processes[1].exitcode is not None or watch.failure is not None)
            assert (watch.failure, processes[1].exitcode) == (None, 0)
    finally:
        for process in processes:
            process.kill()
            process.join()
