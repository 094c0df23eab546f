"""What is said of a run that failed, and when one that goes on slowly is taken for one that hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_plan import ParallelPlan
from hyper_parallel import hanging, notes, worker
from hyper_parallel.launch import Job
from hyper_parallel.notes import note, show_notes


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "flights").mkdir()
    return Job(ParallelPlan.from_dict({}), folder=tmp_path / "run", flights=tmp_path / "flights")


def test_what_ranks_said_is_shown(job, capsys):
    note(job, "rank 1 saved nothing")
    assert capsys.readouterr().err == ""
    show_notes(job, 2)
    assert capsys.readouterr().err == "note: rank 1 saved nothing\n"
    note(Job(job.plan), "there is no launcher")
    assert capsys.readouterr().err == "note: there is no launcher\n"


def test_steps_that_nobody_saved_are_named(job, capsys, monkeypatch):
    steps = {0: 8, 1: 9}
    monkeypatch.setattr(notes, "read_flight", lambda folder, rank: SimpleNamespace(step=steps[rank]))
    show_notes(job, 2)
    said = capsys.readouterr().err
    assert said.startswith("note: step 9 was finished and not saved; there is no checkpoint; no rank was left")
    monkeypatch.setattr(notes, "steps_in", lambda folder: [5, 8])
    show_notes(job, 2)
    assert "; the newest checkpoint is step 8; " in capsys.readouterr().err
    monkeypatch.setattr(notes, "steps_in", lambda folder: [5, 9])
    show_notes(job, 2)
    assert capsys.readouterr().err == ""


def test_a_rank_that_goes_on_is_no_hang(tmp_path, monkeypatch):
    polls, hung = [0], threading.Event()

    def content(watch, rank):
        """Rank 0 goes on for a hundred polls; rank 1 waits for it."""
        polls[0] += rank == 0
        return str(min(polls[0], 100)).encode() if rank == 0 else b""

    def hangs(watch, idle):
        assert polls[0] > 100
        hung.set()
        return True

    monkeypatch.setattr(hanging.Watch, "_content", content)
    monkeypatch.setattr(hanging.Watch, "_hangs", hangs)
    with hanging.Watch(tmp_path, 2, 0.02, {}):
        assert hung.wait(60)


def test_a_warning_of_the_run_is_one_line(recwarn):
    here, other = Path(worker.__file__), Path(__file__)
    assert worker.format_warning("it was passed over", RuntimeWarning, str(here), 7) == "warning: it was passed over\n"
    assert worker.format_warning("slow", RuntimeWarning, str(other), 7).startswith(f"{other}:7: RuntimeWarning: slow")
