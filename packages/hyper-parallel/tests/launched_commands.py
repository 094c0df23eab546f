"""Commands with ranks on a model of their own, and a launcher that runs one after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from command_process import CommandProcess, program

# A model that needs no transformers, and does at a call what its arguments say.
MODEL = """
import ctypes, os, signal, time
import torch
from hp_platform import get_platform
from torch import nn

class Bigram(nn.Module):
    def __init__(self, run, victim, end):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(256, 9), nn.Linear(9, 256), 0
        self.run, self.victim, self.end = run, victim, end

    def forward(self, input_ids, labels):
        self.calls += 1
        rank = get_platform().groups.rank()
        if self.calls == 1:
            open(f"{self.run}.rank{rank}.pid", "w").write(str(os.getpid()))
        if self.calls == 3 and rank == self.victim:
            if self.end == "raise":
                raise ValueError("the weights went bad")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3:
            hang(self.end, rank)
        if self.end == "wait":
            time.sleep(0.05)
        if self.end == "hang" and rank == 1:
            time.sleep(1e6)  # and rank 0 waits for it in a collective
        logits = self.head(self.embed(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}

class Own(torch.Tensor):
    pass

def hang(how, rank):
    if how in ("another", "refused"):
        tensor = torch.zeros(3 if rank == 1 else 4)
        if how == "another":
            tensor = tensor.as_subclass(Own)  # for gloo, which doesn't compare
        get_platform().collectives.all_reduce(tensor, group=get_platform().groups.default_group())
    if rank != 2:
        return
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "loop":
        pass
    if how == "keep":
        ctypes.PyDLL(None).sleep(100000)  # in C, without letting go of the interpreter

def bigram(run="run", victim=-1, end=""):
    return Bigram(run, victim, end)

class InBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 9), nn.Linear(9, 256)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

def in_blocks():
    return InBlocks()
"""
PLAN = """
[model]
function = "bigram:bigram"
[mesh]
dp_shard = 2
[data]
sequence_length = 16
batch_size = 8
[optimizer]
lr = 0.05
[run]
steps = 4
stop_within = 2.0
[model.overrides]
"""
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "hyper_parallel",
]
SLOW = ["--set", "run.stop_within=25"]  # for ranks that end by themselves, on a busy machine
ENDLESS = ["--data", "text", "--steps", "100000", "--json"]
LIMIT = 300  # seconds: a hang, not a slow machine

LAUNCHER = program("""
from hyper_parallel.torch import launch
launch._OURS += ("matplotlib.figure", "matplotlib.backends.backend_agg")  # once, and not in each command's rank 0
""")


def write_plan(folder: Path, run: str, **overrides: object) -> str:
    """Write a plan that the folder's model takes; get the name of its file."""
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in {"run": run, **overrides}.items()]
    (folder / f"{run}.toml").write_text(PLAN + "".join(lines))
    return f"{run}.toml"


def fill(folder: Path) -> Path:
    (folder / "bigram.py").write_text(MODEL)
    (folder / "text").write_bytes(b"to be or not to be, " * 20)
    write_plan(folder, "run")
    return folder


def join_as_of_torchrun(connection: Any, rank: int, folder: Path, port: int, environment: dict[str, str]) -> None:
    """Run the command in this process with the environment that torchrun gives to one of two ranks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update(environment, HYPER_PARALLEL_DEVICE="cpu", MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    os.environ.update({name: str(value) for name, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    os.chdir(folder)
    for number, name in ((1, f"out{rank}"), (2, f"err{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    from hyper_parallel.commands import cli

    try:
        status = cli.main(["train", "run.toml", "--data", "text", "--out", "run", "--json"])
    except SystemExit as ended:
        status = ended.code
    sys.stdout.flush()
    connection.send(status or 0)


STARTED: list[subprocess.Popen[str]] = []


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*arguments],
        cwd=folder,
        env={**os.environ, "HYPER_PARALLEL_DEVICE": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    return process


def end(process: subprocess.Popen[str]) -> None:
    STARTED.remove(process)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Launcher(CommandProcess):
    """A process that runs the command once for each `begin`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(start(fill(folder), sys.executable, "-c", LAUNCHER), folder)
        self.running = False

    def begin(self, *arguments: str) -> None:
        self.running = True
        super().begin(*arguments)

    def finish(self, limit: float = LIMIT) -> tuple[int, str, str]:
        """Wait for the command's end; get its exit status and what it wrote."""
        ended = super().finish(limit)
        self.running = False
        return ended


def alive(folder: Path, run: str = "run") -> list[int]:
    """The ranks that still run."""
    found = []
    for path in folder.glob(f"{run}.rank*.pid"):
        try:
            os.kill(int(path.read_text()), 0)
            if "\nState:\tZ" in Path(f"/proc/{path.read_text()}/status").read_text():
                continue  # whom nobody waited for
        except (ProcessLookupError, FileNotFoundError, ValueError):  # ended, or not written yet
            continue
        found.append(int(path.stem.removeprefix(f"{run}.rank")))
    return sorted(found)


def wait_until(done) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
