"""The command with ranks of MindSpore: they start, they train, and none outlives the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

# A model that does at a call what the environment says.
MODEL = """
import os, signal, time
from mindspore import mint, nn, ops

class Embedding(mint.nn.Embedding):
    def construct(self, tokens):
        return ops.gather(self.weight, tokens, 0)

class Bigram(nn.Cell):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head, self.calls = Embedding(256, width), mint.nn.Linear(width, 256), 0

    def construct(self, input_ids, labels):
        self.calls += 1
        rank = int(os.environ["RANK_ID"])
        if self.calls == 1:
            open(f"rank{rank}.pid", "w").write(str(os.getpid()))
        if "SAY" in os.environ:
            print(f"rank {rank}, training: {self.training}")
        if self.calls == 3 and rank == int(os.environ.get("VICTIM", "-1")):
            if os.environ["END"] == "raise":
                raise ValueError("the weights went bad")
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("END") == "wait":
            time.sleep(0.05)
        likely = ops.log_softmax(self.head(self.embed(input_ids[:, :-1])), -1)
        return {"loss": -ops.mean(ops.gather_elements(likely, 2, ops.expand_dims(labels[:, 1:], -1)))}

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
platform = "mindspore"
steps = 4
"""
COMMAND = [sys.executable, "-m", "hyper_parallel"]
TRAIN = ["train", "plans/plan.toml", "--data", "text", "--out", "run"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "bigram.py").write_text(MODEL)  # Found beside the plan.
    (tmp_path / "plans" / "plan.toml").write_text(PLAN)
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 20)
    return tmp_path


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*arguments],
        cwd=folder,
        env={**os.environ, "HYPER_PARALLEL_DEVICE": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def alive(folder: Path) -> list[int]:
    """The ranks that still run; what msrun leaves unwaited for is dead, too."""
    found = []
    for path in folder.glob("rank*.pid"):
        try:
            ended = psutil.Process(int(path.read_text())).status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ValueError):  # ended, or not written yet
            continue
        if not ended:
            found.append(int(path.stem.removeprefix("rank")))
    return found


def test_training_leaves_its_files_and_speaks_json(folder):
    process = start(folder, *COMMAND, *TRAIN, "--steps", "30", "--json", SAY="1")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    *steps, summary = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    # What the model prints on rank 0 is shown.
    assert [line for line in out.splitlines() if not line.startswith("{")] == ["rank 0, training: True"] * 30
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert summary["tokens"] == 30 * 8 * 16
    assert len(summary["peak_memory"]) == 2
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == steps
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "steps = 30" in (folder / "run" / "plan.toml").read_text()
    shapes = {name: array.shape for name, array in load_file(folder / "run/checkpoint/model.safetensors").items()}
    assert shapes == {"embed.weight": (256, 9), "head.weight": (256, 9), "head.bias": (256,)}
    assert not alive(folder)


def test_training_joins_msrun(folder):
    msrun = str(Path(sys.executable).with_name("msrun"))
    options = ["--worker_num=2", "--local_worker_num=2", "--join=True", "--log_dir=logs", "--tail_worker_log=-1"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [msrun, *options, f"--master_port={_free_port()}", "python", *COMMAND[1:], *TRAIN, "--json"]
    process = start(folder, *command, PATH=path)
    process.communicate(timeout=180)
    lines = [line for line in (folder / "logs" / "worker_0.log").read_text().splitlines() if line.startswith("{")]
    assert process.returncode == 0, (folder / "logs" / "worker_0.log").read_text()
    assert [json.loads(line).get("step") for line in lines] == [1, 2, 3, 4, None]


def _free_port() -> int:
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return reserved.getsockname()[1]


def test_a_rank_that_raises_ends_all_and_is_named(folder):
    process = start(folder, *COMMAND, *TRAIN, VICTIM="1", END="raise")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "error: rank 1 failed first; all ranks are ended" in err
    assert 'raise ValueError("the weights went bad")' in err
    assert not alive(folder)


def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it(folder):
    process = start(folder, *COMMAND, *TRAIN, VICTIM="1", END="kill")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "error: rank 1 failed first; all ranks are ended. Its end:\nkilled by SIGKILL (process" in err
    assert not alive(folder)


def test_an_interrupt_ends_every_rank(folder):
    process = start(folder, *COMMAND, *TRAIN, "--steps", "100000", "--json", END="wait")
    assert process.stdout is not None
    process.stdout.readline()  # The first step is done.
    assert sorted(alive(folder)) == [0, 1]
    os.killpg(process.pid, signal.SIGINT)  # What a terminal does.
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert process.returncode == 130
    assert err.strip() == "error: interrupted by SIGINT: all ranks are ended"
    assert not alive(folder)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_no_process_outlives_the_launcher(folder, name):
    process = start(folder, *COMMAND, *TRAIN, "--steps", "100000", "--json", END="wait")
    deadline = time.monotonic() + 120
    while sorted(alive(folder)) != [0, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)  # msrun, its scheduler and its ranks
    assert len(started) >= 4
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    if name == "SIGTERM":
        assert (process.returncode, err.strip()) == (130, "error: interrupted by SIGTERM: all ranks are ended")
    _, still = psutil.wait_procs(started, timeout=60)
    assert not [each for each in still if each.status() != psutil.STATUS_ZOMBIE]
