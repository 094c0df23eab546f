"""What rank 0's writer knows of writers that don't come to their end."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from hp_checkpoint.saving import writer_process as writer

SPAWN = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.not_on("torch-npu-sim", reason="nothing of the device in it")


def has_a_job(part, rank):
    with writer._writing(part, rank):
        time.sleep(600)


@pytest.fixture
def other(tmp_path):
    """A writer of rank 1 that has a job, and holds its lock."""
    process = SPAWN.Process(target=has_a_job, args=(tmp_path, 1))
    process.start()
    deadline = time.monotonic() + 240
    while not writer._lock_file(tmp_path, 1).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


def leave(part, rank):
    writer._leave(part / f"rank-{rank}.done", b"rows")


def test_a_writer_that_was_killed_is_named_while_the_training_goes_on(tmp_path, other, monkeypatch):
    monkeypatch.setattr(writer, "_orphaned", lambda: False)
    leave(tmp_path, 0)
    assert not writer._ended(tmp_path, 1)
    other.kill()
    other.join()
    with pytest.raises(RuntimeError, match=r"the writers of the ranks \[1\] were killed"):
        writer._gathered(tmp_path, 2)
    leave(tmp_path, 1)  # one that was killed when it was done has done its part
    assert writer._gathered(tmp_path, 2) == [b"rows", b"rows"]
    assert not list(tmp_path.iterdir())


def test_an_orphan_waits_less_for_those_that_have_no_job(tmp_path, other, monkeypatch):
    monkeypatch.setattr(writer, "_orphaned", lambda: True)
    monkeypatch.setattr(writer, "_WITHOUT_JOB", 0.1)
    leave(tmp_path, 0)
    with pytest.raises(RuntimeError, match=r"the writers of the ranks \[2\] did not end, and the training has ended"):
        writer._gathered(tmp_path, 3)
    monkeypatch.setattr(writer, "_PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match=r"the writers of the ranks \[1\] did not end, and the training has ended"):
        writer._gathered(tmp_path, 2)
