"""The command with ranks of MindSpore: they start, they train, and none outlives the others.

What the launcher does where ranks raise, or a signal comes, is tried on ranks that load no MindSpore: each of msrun's
processes takes seconds for that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from hp_plan import ParallelPlan
from hp_testing.pools.processes import ended
from hyper_parallel.launching.launch import Interrupted, Job, RankFailure
from hyper_parallel.mindspore.launch import _Signalled, _signals_raise, launch

# A model that does at a call what the environment says.
MODEL = """
import os, signal
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
            os.kill(os.getpid(), signal.SIGKILL)
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


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A test that fails, as by a time limit, ends what it started."""
    with contextlib.ExitStack() as stack:
        _started.append(stack)
        yield
        _started.pop()


_started: list[contextlib.ExitStack] = []


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
    return _started[-1].enter_context(ended(process))


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


def check_run(folder: Path, out: list[str], count: int) -> list[dict[str, Any]]:
    """Check the files that a run of two ranks has left, and what it has said; get its steps."""
    *steps, summary = map(json.loads, (line for line in out if line.startswith("{")))
    assert [step["step"] for step in steps] == list(range(1, count + 1))
    assert summary["tokens"] == count * 8 * 16
    assert len(summary["peak_memory"]) == 2
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == steps
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"steps = {count}" in (folder / "run" / "plan.toml").read_text()
    model = folder / f"run/checkpoints/step-{count:08}/model.safetensors"
    shapes = {name: array.shape for name, array in load_file(model).items()}
    assert shapes == {"embed.weight": (256, 9), "head.weight": (256, 9), "head.bias": (256,)}
    assert not alive(folder)
    return steps


@pytest.mark.thorough  # with less, the next two
def test_training_learns_and_shows_what_the_model_prints(folder):
    process = start(folder, *COMMAND, *TRAIN, "--steps", "30", "--json", SAY="1")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith("{")] == ["rank 0, training: True"] * 30, "that of rank 0"
    steps = check_run(folder, lines, 30)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1


def test_training_joins_msrun(folder):
    msrun = str(Path(sys.executable).with_name("msrun"))
    options = ["--worker_num=2", "--local_worker_num=2", "--join=True", "--log_dir=logs", "--tail_worker_log=-1"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [msrun, *options, f"--master_port={_free_port()}", "python", *COMMAND[1:], *TRAIN, "--json"]
    process = start(folder, *command, PATH=path)
    process.communicate(timeout=600)
    said = (folder / "logs" / "worker_0.log").read_text()
    assert process.returncode == 0, said
    check_run(folder, said.splitlines(), 4)


def _free_port() -> int:
    import socket

    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return reserved.getsockname()[1]


def test_a_rank_that_is_killed_is_named_and_not_those_that_lost_it(folder):
    process = start(folder, *COMMAND, *TRAIN, VICTIM="1", SAY="1")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "rank 0, training: True\n" in out, "what the model prints on rank 0 is shown"
    assert "error: rank 1 failed first; all ranks are ended. Its end:\nkilled by SIGKILL (process" in err
    assert "\nIt was in step 3 (step), after " in err
    assert "note: step 2 was finished and not saved; there is no checkpoint; no rank was left that could" in err
    assert not alive(folder)


# Work for ranks without MindSpore; msrun's scheduler does it, too.
WORK = """
import os, time
from hp_platform.extend import launcher_place

def hang(job):
    rank = launcher_place().rank
    if rank >= 0:
        open(f"rank{rank}.pid", "w").write(str(os.getpid()))
    time.sleep(120)

def leave(job):
    os._exit(0)

def save_and_leave(job):
    import signal
    from hyper_parallel.supervision.run_end import Stop
    stop, rank = Stop(job.plan.run.stop_within), launcher_place().rank
    if rank < 0:
        hang(job)
    stop.listen()
    open(f"rank{rank}.pid", "w").write(str(os.getpid()))
    while not stop.asked:
        time.sleep(0.01)
    time.sleep(0.5)
    open(f"rank{rank}.saved", "w").close()

def stand_still(job):
    from hp_platform.extend import record_flight
    rank = launcher_place().rank
    if rank >= 0:
        record_flight(job.flights, rank).note("step", 2)
        hang(job)

def fail(job):
    if launcher_place().rank == 1:
        raise ValueError("the weights went bad")
    hang(job)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "work_of_ranks.py").write_text(WORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield importlib.import_module("work_of_ranks")
    del sys.modules["work_of_ranks"]


LAUNCHER = """
import pickle, work_of_ranks
from hyper_parallel.mindspore.launch import launch
launch(work_of_ranks.hang, pickle.load(open("job", "rb")), ranks=2)
"""
JOB = Job(ParallelPlan.from_dict({"mesh": {"dp_shard": 2}}))


def msruns_processes(folder: Path) -> list[psutil.Process]:
    """Wait until both ranks are there; get msrun, its scheduler and its ranks."""
    deadline = time.monotonic() + 100
    while sorted(alive(folder)) != [0, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    msrun = psutil.Process(int((folder / "rank0.pid").read_text())).parent()
    assert msrun is not None
    started = [msrun, *msrun.children()]
    assert len(started) >= 4
    return started


def all_ended(started: list[psutil.Process]) -> bool:
    _, still = psutil.wait_procs(started, timeout=60)
    return all(each.status() == psutil.STATUS_ZOMBIE for each in still)


def test_a_rank_that_raises_ends_all_and_is_named(work, tmp_path):
    with pytest.raises(RankFailure, match="rank 1 failed first; all ranks are ended") as caught:
        launch(work.fail, JOB, ranks=2)
    assert caught.value.rank == 1
    assert 'raise ValueError("the weights went bad")' in str(caught.value)
    assert not alive(tmp_path)


def test_ranks_that_leave_without_a_word_are_not_waited_for(work):
    with pytest.raises(RankFailure, match="rank 0 failed first; .*\n.*ended without a word, and msrun with 0"):
        launch(work.leave, JOB, ranks=2)


def test_a_hang_ends_with_the_stack(work, tmp_path):
    plan = ParallelPlan.from_dict({"mesh": {"dp_shard": 2}, "run": {"hang_after": 2.0}})
    with pytest.raises(RankFailure, match="the run hung: for 2 s no rank went on") as caught:
        launch(work.stand_still, Job(plan), ranks=2)
    assert "ranks 0, 1 are in no collective" in str(caught.value)
    assert 'Stack of rank 0, in step 3 (step):\n  File "' in str(caught.value)
    assert "in hang" in str(caught.value)
    assert not alive(tmp_path)


@pytest.mark.thorough
def test_a_signal_ends_every_rank(work, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    started: list[psutil.Process] = []

    def interrupt() -> None:
        started.extend(msruns_processes(tmp_path))
        assert signal.getsignal(signal.SIGTERM) is not before  # else it would end the tests
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(Interrupted, match="SIGTERM: all ranks are ended"):
        launch(work.hang, JOB, ranks=2)
    sender.join()
    assert all_ended(started)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_save_before_sigterm_ends_them(work, tmp_path):
    def interrupt() -> None:
        msruns_processes(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(Interrupted, match="SIGTERM: all ranks are ended"):
        launch(work.save_and_leave, JOB, ranks=2)
    sender.join()
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["rank0.saved", "rank1.saved"]
    assert not alive(tmp_path)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_launcher_takes_a_signal_for_all(name):
    with pytest.raises(_Signalled, match=name), _signals_raise():
        signal.raise_signal(getattr(signal, name))


@pytest.mark.thorough
def test_no_process_outlives_the_launcher(work, tmp_path):
    (tmp_path / "job").write_bytes(pickle.dumps(JOB))
    process = start(tmp_path, sys.executable, "-c", LAUNCHER)
    try:
        started = msruns_processes(tmp_path)
    finally:
        process.kill()
        process.communicate(timeout=600)
    assert all_ended(started)
