"""Processes with a launcher's environment, and without any: who they are, and where they meet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hp_platform import get_platform
from hp_platform.extend import Place, launch_command, launcher_place, say_once, speaks_for_ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MSRUN = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "RANK_ID": "3", "DEVICE_ID": "1"}
SRUN = {
    "SLURM_JOB_ID": "12003",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[07-08],old3",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def elsewhere() -> dict[str, str]:
    """The environment without what launchers set."""
    set_by_launchers = {*TORCHRUN, *MSRUN, *SRUN, *RENDEZVOUS}
    return {name: value for name, value in os.environ.items() if name not in set_by_launchers}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, Place(3, 4, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, 1)),
        (MSRUN, Place(3, 4, 1, 4)),
        ({**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}, Place(-1, 4, 1, 4)),
        (SRUN, Place(4, 7, 1, 3, ("gpu07", 20197))),
        ({**SRUN, "MASTER_ADDR": "here", "MASTER_PORT": "5"}, Place(4, 7, 1, 3, ("here", 5))),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "12003", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({**SRUN, **TORCHRUN}, Place(3, 4, 1, 2)),
    ],
    ids=["nobody", "torchrun", "by hand", "msrun", "scheduler", "srun", "its own port", "shell", "batch", "inside"],
)
def test_a_launcher_tells_the_place(monkeypatch, elsewhere, environment, place):
    for name in os.environ.keys() - elsewhere.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher_place() == place


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        (TORCHRUN, False),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, True),  # of the second machine, whose terminal is another
        (MSRUN, True),
        ({**SRUN, "SLURM_LOCALID": "0"}, False),
        ({**SRUN, "SLURM_PROCID": "0"}, True),
    ],
    ids=["nobody", "torchrun", "first of torchrun", "msrun", "srun", "first of srun"],
)
def test_one_rank_speaks_for_those_that_write_together(monkeypatch, elsewhere, environment, speaks):
    for name in os.environ.keys() - elsewhere.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert speaks_for_ranks() is speaks


def test_an_error_of_all_ranks_is_said_by_one(monkeypatch, elsewhere, tmp_path, capsys):
    said, slept, error, other = [], [], ValueError("too wide"), ValueError("another")
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, _: said.append(value))
    for name in os.environ.keys() - elsewhere.keys():
        monkeypatch.delenv(name)
    before = sys.excepthook
    say_once(error, "of the plan")
    assert sys.excepthook is before, "nobody started this process"
    for name, value in {**TORCHRUN, "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}.items():
        monkeypatch.setenv(name, value)
    say_once(error, "of the plan")
    hook = sys.excepthook
    say_once(error, "of the plan")
    assert sys.excepthook is hook, "hooks do not pile up"
    hook(ValueError, other, None)
    assert said == [other]
    hook(ValueError, error, None)
    assert (said, capsys.readouterr().err) == ([other], "ValueError on all ranks: too wide\n")
    assert "of the plan" in (tmp_path / "error").read_text()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", slept.append)
    stopped = signal.getsignal(signal.SIGTERM)
    try:
        hook(ValueError, error, None)
    finally:
        signal.signal(signal.SIGTERM, stopped)
    assert slept and said == [other, error], "nothing has ended this rank, so the error is its own"


PROGRAM = """
import sys
import numpy
import hp_platform
from hp_platform import get_platform
try:
    get_platform().groups.size()
except RuntimeError as error:
    assert "call init_process_group() first" in str(error)
else:
    raise AssertionError
hp_platform.init_process_group()
hp_platform.init_process_group()
groups, platform = get_platform().groups, get_platform()
if platform.name == "torch":
    import torch
    tensor = torch.ones(3) * (groups.rank() + 1)
else:
    import mindspore
    tensor = mindspore.Tensor(numpy.ones(3, "float32"))
platform.collectives.all_reduce(tensor, group=groups.default_group())
sys.stdout.write(f"{groups.rank()} {groups.size()} {[float(each) for each in tensor]}\\n")  # at once
hp_platform.destroy_process_group()
"""


def started(environment: dict[str, str], program: str = PROGRAM) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    named = {"HYPER_PARALLEL_PLATFORM": get_platform().name, "HYPER_PARALLEL_DEVICE": "cpu", "GLOG_v": "3"}
    return subprocess.Popen([sys.executable, "-c", program], env={**environment, **named}, text=True, **pipes)


@pytest.mark.not_on("torch-npu-sim", reason="starts a process of its own; nothing of the device in it")
def test_a_process_that_nobody_started_is_a_world_of_one(elsewhere, tmp_path):
    with started(elsewhere) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "0 1 [1.0, 1.0, 1.0]\n"), err
    command = launch_command(get_platform().name, 2)
    assert err.count(f"no launcher started this process, so it is the only rank; {command} PROGRAM starts two") == 1
    if get_platform().name == "torch":  # msrun's ranks meet at a fixed port
        (tmp_path / "program.py").write_text(PROGRAM)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        named = {**elsewhere, "PATH": path, "HYPER_PARALLEL_DEVICE": "cpu", "TMPDIR": str(tmp_path)}
        done = subprocess.run([*command.split(), "program.py"], cwd=tmp_path, env=named, capture_output=True, text=True)
        lines = sorted(done.stdout.splitlines())
        assert (done.returncode, lines) == (0, [f"{rank} 2 [3.0, 3.0, 3.0]" for rank in range(2)]), done.stderr


@pytest.mark.framework("torch")
@pytest.mark.not_on("torch-npu-sim", reason="starts processes of its own; nothing of the device in it")
def test_tasks_of_srun_meet(elsewhere):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}
    step = {**SRUN, **meeting, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    tasks = [started({**elsewhere, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    for rank, task in enumerate(tasks):
        out, err = task.communicate()
        assert (task.returncode, out) == (0, f"{rank} 2 [3.0, 3.0, 3.0]\n"), err


@pytest.mark.framework("torch")
def test_half_of_an_environment_is_an_error_of_the_framework(elsewhere):
    with started({**elsewhere, "RANK": "0"}) as process:
        _, err = process.communicate()
    assert process.returncode and "WORLD_SIZE" in err
