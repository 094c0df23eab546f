"""The record of a run, and the sinks that a plan names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy
import pytest
from typer.testing import CliRunner

from hp_checkpoint.extend import Ranks
from hp_plan import ParallelPlan
from hyper_parallel.commands import cli
from hyper_parallel.data import Content
from hyper_parallel.reports import sinks
from hyper_parallel.reports.output import OutputError, prepare_folder
from hyper_parallel.reports.run_metadata import begin, git_state
from hyper_parallel.reports.sinks import open_sinks
from hyper_parallel.training.checking import check_run

PLAN = ParallelPlan.from_dict({"data": {"paths": ["text"]}, "metrics": {"sinks": ["tensorboard"]}})
CONTENTS = (Content("", 400, None, "1234"),)


def test_each_start_of_a_run_is_kept(tmp_path):
    first = begin(tmp_path, PLAN, CONTENTS, step=0, ranks=Ranks(alone=True))
    again = begin(tmp_path, PLAN, CONTENTS, step=3, ranks=Ranks(alone=True))
    assert first is not None and again is not None
    assert again == json.loads((tmp_path / "run.json").read_text())
    assert again["id"] == first["id"]
    assert [start["step"] for start in again["starts"]] == [0, 3]
    start = again["starts"][-1]
    assert ParallelPlan.from_dict(start["plan"]) == PLAN
    assert start["data"] == [{"path": "", "tokens": 400, "documents": None, "digest": "1234"}]
    assert start["ranks"] == start["hosts"][0]["ranks"] == 1
    assert start["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "mindspore"} & start["versions"].keys() and start["versions"]["numpy"] == numpy.__version__
    assert start["hosts"][0]["device"]["name"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(OutputError, match="has a run, which would be overwritten"):
        prepare_folder(tmp_path, name="x")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(OutputError, match=r"run\.json can't be read: .*; move it away to go on without it"):
        begin(tmp_path, PLAN, CONTENTS, step=3, ranks=Ranks(alone=True))
    (tmp_path / "run.json").rename(tmp_path / "away")
    anew = begin(tmp_path, PLAN, CONTENTS, step=3, ranks=Ranks(alone=True))
    assert anew is not None and [start["step"] for start in anew["starts"]] == [3]


def test_the_state_of_the_working_folder(tmp_path):
    assert git_state(tmp_path) is None

    def git(*command):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *command],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init")
    (tmp_path / "model.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    clean = git_state(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and clean["changed"] == []
    (tmp_path / "model.py").write_text("x = 2\n")
    assert git_state(tmp_path) == {"commit": clean["commit"], "changed": ["model.py"]}


class Broken:
    def __init__(self, *_, **__):
        raise OSError("no network")


def test_the_sinks_of_a_plan_get_its_record_and_a_broken_one_stops_nothing(tmp_path, monkeypatch):
    kept = []

    class Kept:
        def __init__(self, folder, *, after):
            kept.append((folder.name, after))

        def write(self, step, metrics):
            kept.append((step, metrics))

        def text(self, name, value):
            kept.append((name, json.loads(value)["plan"]))

        def close(self):
            kept.append("closed")

    monkeypatch.setattr(sinks, "TensorBoard", Kept)
    monkeypatch.setattr(sinks, "WeightsAndBiases", Broken)
    record = {"id": "x", "starts": [{"step": 0}, {"step": 7, "plan": {"mesh": {"tp": 2}}}]}
    with pytest.warns(RuntimeWarning, match="the sink wandb failed and gets no more metrics: OSError: no network"):
        opened = open_sinks(["tensorboard", "wandb"], tmp_path, record)
        for sink in opened:
            sink.write(8, {"loss": 1.0})
            sink.close()
    assert kept == [("tensorboard", 7), ("run", {"mesh": {"tp": 2}}), (8, {"loss": 1.0}), "closed"]


def test_a_sink_whose_library_is_missing_is_refused_before_the_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "LIBRARIES", {"tensorboard": "no_such_library_1", "wandb": "no_such_library_2"})
    plan = tmp_path / "plan.toml"
    plan.write_text('[model]\nfunction = "x:y"\n[metrics]\nsinks = ["wandb"]\n')
    monkeypatch.setenv("COLUMNS", "200")
    environment = dict(os.environ)
    result = CliRunner().invoke(cli.app, ["lint", str(plan)])
    os.environ.clear()
    os.environ.update(environment)
    assert result.exit_code == 1
    assert "metrics.sinks" in result.output and "pip install 'hyper-parallel[wandb]'" in result.output
    (found,) = check_run(ParallelPlan.from_toml(plan))
    assert found.fix == "pip install 'hyper-parallel[wandb]', or leave it out"
    assert check_run(ParallelPlan.from_dict({})) == []
    monkeypatch.setattr(sinks, "LIBRARIES", {"wandb": "json"})  # installed
    assert check_run(ParallelPlan.from_toml(plan)) == []


@pytest.mark.parametrize(
    ("value", "text"), [(["wanbd"], "wandb"), ("wandb", "a list of some of tensorboard, wandb"), ([3], "a list")]
)
def test_other_sinks_are_refused_with_those_that_there_are(value, text):
    with pytest.raises(ValueError, match=rf"metrics\.sinks.*{text}"):
        ParallelPlan.from_dict({"metrics": {"sinks": value}})
