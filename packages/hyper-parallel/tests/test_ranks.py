"""The command with ranks: they start, they train, and none outlives the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.framework("torch"),  # its programs are; tests/mindspore has those of msrun
    pytest.mark.not_on("torch-npu-sim", reason="starts its own ranks; nothing of the device in it"),
]

# A model that needs no transformers, and does at a call what the environment says.
MODEL = """
import os, signal, time
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(256, width), nn.Linear(width, 256), 0

    def forward(self, input_ids, labels):
        self.calls += 1
        rank = int(os.environ["RANK"])
        if self.calls == 1:
            open(f"rank{rank}.pid", "w").write(str(os.getpid()))
        if self.calls == 3 and rank == int(os.environ.get("VICTIM", "-1")):
            if os.environ["END"] == "raise":
                raise ValueError("the weights went bad")
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("END") == "wait":
            time.sleep(0.05)
        if os.environ.get("END") == "hang" and rank == 1:
            time.sleep(1e6)  # and rank 0 waits for it in a collective
        logits = self.head(self.embed(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

def bigram(width):
    return Bigram(width)
"""
PLAN = """
[model]
function = "bigram:bigram"
[model.overrides]
width = 9
[mesh]
dp_shard = 2
[data]
sequence_length = 16
batch_size = 8
[optimizer]
lr = 0.05
[run]
steps = 4
"""
COMMAND = [sys.executable, "-m", "hyper_parallel"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bigram.py").write_text(MODEL)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 20)
    return tmp_path


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _end_what_a_failed_test_left():
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*arguments],
        cwd=folder,
        env={**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def alive(folder: Path) -> list[int]:
    """The ranks that still run."""
    found = []
    for path in folder.glob("rank*.pid"):
        try:
            os.kill(int(path.read_text()), 0)
            if "\nState:\tZ" in Path(f"/proc/{path.read_text()}/status").read_text():
                continue  # whom nobody waited for
        except (ProcessLookupError, FileNotFoundError, ValueError):  # ended, or not written yet
            continue
        found.append(int(path.stem.removeprefix("rank")))
    return found


def wait_until(done) -> None:
    deadline = time.monotonic() + 300  # a hang, not a slow machine
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_training_leaves_its_files_and_speaks_json(folder):
    arguments = ["train", "plan.toml", "--data", "text", "--out", "run", "--steps", "30", "--json"]
    process = start(folder, *COMMAND, *arguments)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    *steps, summary = map(json.loads, out.splitlines())
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert summary["tokens"] == 30 * 8 * 16
    assert len(summary["peak_memory"]) == 2
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == steps
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "steps = 30" in (folder / "run" / "plan.toml").read_text()
    assert (folder / "run" / "checkpoint" / "model.safetensors").stat().st_size > 4 * 256 * 9
    assert not alive(folder)


def test_training_joins_torchrun(folder):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(folder, *launcher, *COMMAND[1:], "train", "plan.toml", "--data", "text", "--out", "run", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert [json.loads(line).get("step") for line in out.splitlines()] == [1, 2, 3, 4, None]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_raises_ends_all_and_is_named(folder, victim):
    environment = {"VICTIM": str(victim), "END": "raise"}
    process = start(folder, *COMMAND, "train", "plan.toml", "--data", "text", "--out", "run", **environment)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"error: rank {victim} failed first; all ranks are ended" in err
    assert "Traceback (most recent call last)" in err
    assert 'raise ValueError("the weights went bad")' in err
    assert not alive(folder)


def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it(folder):
    environment = {"VICTIM": "1", "END": "kill"}
    process = start(folder, *COMMAND, "train", "plan.toml", "--data", "text", "--out", "run", **environment)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "error: rank 1 failed first; all ranks are ended. Its end:\nkilled by SIGKILL (process" in err
    assert not alive(folder)


@pytest.mark.parametrize("whom", ["launcher", "everyone"])
def test_an_interrupt_ends_every_rank(folder, whom):
    process = start(
        folder,
        *COMMAND,
        "train",
        "plan.toml",
        "--data",
        "text",
        "--out",
        "run",
        "--steps",
        "100000",
        "--json",
        END="wait",
    )
    assert process.stdout is not None
    process.stdout.readline()  # The first step is done.
    assert sorted(alive(folder)) == [0, 1]
    if whom == "launcher":
        process.send_signal(signal.SIGINT)
    else:  # What a terminal does.
        os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=300)
    assert time.monotonic() - started < 30
    assert process.returncode == 130
    assert err.strip() == "error: interrupted by SIGINT: all ranks are ended"
    assert not alive(folder)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_no_rank_outlives_its_launcher(folder, name):
    arguments = ["train", "plan.toml", "--data", "text", "--out", "run", "--steps", "100000", "--json"]
    process = start(folder, *COMMAND, *arguments, END="hang")
    wait_until(lambda: sorted(alive(folder)) == [0, 1])
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=300)
    if name == "SIGKILL":
        assert process.returncode == -signal.SIGKILL
    else:
        assert (process.returncode, err.strip()) == (130, f"error: interrupted by {name}: all ranks are ended")
    wait_until(lambda: not alive(folder))


def test_no_rank_outlives_torchrun(folder):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["train", "plan.toml", "--data", "text", "--out", "run", "--steps", "100000", "--json"]
    process = start(folder, *launcher, *COMMAND[1:], *arguments, END="wait")
    wait_until(lambda: sorted(alive(folder)) == [0, 1])
    process.kill()
    process.communicate(timeout=300)
    wait_until(lambda: not alive(folder))


def test_verify_finds_the_bigram_equal(folder):
    process = start(folder, *COMMAND, "verify", "plan.toml", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["passed"]
    assert result["ranks"] == 2
    assert [row["module"] for row in result["rows"]] == ["embed", "head"]
