"""What is said of a run that failed, and when one that goes on slowly is taken for one that hangs."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from hp_plan import ParallelPlan
from hyper_parallel import worker
from hyper_parallel.launching.launch import Job
from hyper_parallel.supervision import hanging
from hyper_parallel.supervision import run_end as notes
from hyper_parallel.supervision.run_end import keeping_warnings, note, show_notes


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


def test_warnings_are_shown_and_stay_in_the_folder_of_the_run(tmp_path):
    with warnings.catch_warnings(record=True) as shown, keeping_warnings(1) as kept:
        warnings.simplefilter("always")
        warnings.warn("before the folder is known", stacklevel=1)
        kept.write_to(tmp_path)
        warnings.warn("a later one", DeprecationWarning, stacklevel=1)
    lines = [json.loads(line) for line in (tmp_path / "warnings.jsonl").read_text().splitlines()]
    texts = ["UserWarning: before the folder is known", "DeprecationWarning: a later one"]
    assert lines == [{"rank": 1, "text": text} for text in texts]
    assert [str(each.message) for each in shown] == ["before the folder is known", "a later one"]
