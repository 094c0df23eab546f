from __future__ import annotations

import re

import pytest

from hyper_parallel.reports.output import OutputError, claimed, prepare_folder


def test_the_folder_is_named_by_plan_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = prepare_folder(None, name="qwen3")
    assert re.fullmatch(r"runs/qwen3-\d{8}-\d{6}", folder.as_posix())
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    assert not list((folder / "checkpoints").iterdir())


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        OutputError, match=r"the checkpoint can't be written to .*file/run: Not a directory .*with --out"
    ):
        prepare_folder(tmp_path / "file" / "run", name="x")
    assert prepare_folder(tmp_path / "other", name="x").is_dir()


def test_a_url_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="--out: s3:/+bucket/run is a URL; checkpoints are read and written in fold"):
        prepare_folder("s3://bucket/run", name="x")
    assert not list(tmp_path.iterdir())
    assert prepare_folder("bucket/run", name="x").is_dir()


def test_a_run_is_not_overwritten(tmp_path, monkeypatch):
    folder = prepare_folder(tmp_path / "run", name="x")
    (folder / "metrics.jsonl").touch()
    with pytest.raises(OutputError, match=r"run has a run, which would be overwritten; go on with it by --resume auto"):
        prepare_folder(tmp_path / "run", name="x")
    assert prepare_folder(tmp_path / "run", name="x", resume=True) == folder
    assert prepare_folder(tmp_path / "elsewhere", name="x") == tmp_path / "elsewhere"
    (tmp_path / "other" / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "other" / "checkpoints" / "step-00000003" / "manifest.json").touch()
    with pytest.raises(OutputError, match=r"other has a run, which would be overwritten"):
        prepare_folder(tmp_path / "other", name="x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20261123-051500")
    assert [prepare_folder(None, name="x").name for _ in range(3)] == [
        f"x-20261123-051500{end}" for end in ("", "-2", "-3")
    ]


def test_two_runs_at_a_time_in_one_folder(tmp_path):
    with claimed(tmp_path), pytest.raises(OutputError, match=r"another process is training in .*; wait for its end"):
        with claimed(tmp_path):
            pass
    with claimed(tmp_path), claimed(prepare_folder(tmp_path / "other", name="x")):
        pass
    with claimed(tmp_path):
        pass
