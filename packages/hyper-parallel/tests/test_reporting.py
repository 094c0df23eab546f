"""What is said of a run that ended before its time."""

from __future__ import annotations

import signal

import pytest
import typer

from hyper_parallel.commands.reporting import saying_what_is_saved, user_errors
from hyper_parallel.launching.launch import Interrupted, RankFailure
from hyper_parallel.reports.output import CHECKPOINTS, METRICS


def said(error: Exception, folder, capsys) -> str:
    with pytest.raises(type(error)), saying_what_is_saved(folder):
        raise error
    return capsys.readouterr().err


def save(folder, step):
    (folder / CHECKPOINTS / f"step-{step:08}").mkdir(parents=True)
    (folder / CHECKPOINTS / f"step-{step:08}" / "manifest.json").touch()


def test_a_run_that_has_a_checkpoint_goes_on_from_it(tmp_path, capsys):
    save(tmp_path, 12)
    note = f"note: go on from step 12 by --resume auto --out {tmp_path}\n"
    assert said(Interrupted(signal.SIGTERM), tmp_path, capsys) == note
    assert said(ValueError("another"), tmp_path, capsys) == ""
    assert said(RankFailure(1, "step 12 can't be read"), tmp_path, capsys) == ""
    with pytest.raises(RankFailure), saying_what_is_saved(tmp_path):
        save(tmp_path, 14)
        raise RankFailure(1, "killed")
    assert "go on from step 14" in capsys.readouterr().err


def test_only_a_run_that_had_begun_lacks_a_checkpoint(tmp_path, capsys):
    interrupted = Interrupted(signal.SIGINT)
    assert said(interrupted, tmp_path, capsys) == ""
    (tmp_path / METRICS).touch()
    assert said(interrupted, tmp_path, capsys).startswith("note: the run has no checkpoint: it was not left")


def test_a_stop_that_saved_every_step_is_no_error(tmp_path, capsys):
    save(tmp_path, 12)
    (tmp_path / METRICS).write_text('{"step": 11}\n{"step": 12}\n')
    with pytest.raises(typer.Exit) as ended, user_errors(), saying_what_is_saved(tmp_path):
        raise Interrupted(signal.SIGTERM)
    place = tmp_path / CHECKPOINTS / "step-00000012"
    said_then = f"stopped by SIGTERM: step 12 is saved in {place}; go on by --resume auto --out {tmp_path}\n"
    assert (ended.value.exit_code, capsys.readouterr().err) == (128 + signal.SIGTERM, said_then)
    (tmp_path / METRICS).write_text('{"step": 12}\n{"step": 13}\n')
    with pytest.raises(typer.Exit) as ended, user_errors(), saying_what_is_saved(tmp_path):
        raise Interrupted(signal.SIGTERM)
    note = f"note: go on from step 12 by --resume auto --out {tmp_path}\n"
    error = "error: interrupted by SIGTERM: all ranks are ended\n"
    assert (ended.value.exit_code, capsys.readouterr().err) == (128 + signal.SIGTERM, note + error)
