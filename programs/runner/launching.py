"""Starts a program under torchrun or msrun, or alone; waits for its end; ends what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from runner.catalogue import FOLDER, Launch, Program

_MARK = "PROGRAM_RUN"  # a variable by which the processes of one start are found again
_GRACE = 60.0  # seconds for what may outlive the launcher: a writer of checkpoints ends its save
_TORCHRUN = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")
_MSRUN = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")


_started: set[str] = set()  # marks of what may still run


@dataclass
class Ended:
    """How a start ended.

    Attributes:
        exit: the launcher's exit status; None if it did not end in time.
        failed: exit status by rank, of those that the launcher names.
        output: what was printed, of all ranks.
        left: command lines of processes that were still there later; they are ended.
        seconds: CPU seconds of the launcher and the ranks.
    """

    exit: int | None
    failed: dict[int, int]
    output: str
    left: list[str]
    seconds: float


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a start: those of this process, and no network, accelerator or second thread."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "GLOG_v": "3"}
    variables |= {"HYPER_PARALLEL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", _MARK: uuid.uuid4().hex}
    return variables | {"PYTHONPATH": os.pathsep.join(paths), "PROGRAM_REPORTS": str(folder)}


def start(program: Program, launch: Launch, folder: Path, reports: Path, *, python: str, limit: float) -> Ended:
    """Run a program once.

    Args:
        program: it.
        launch: on how many ranks, and what befalls them.
        folder: where it runs.
        reports: an empty folder for its reports.
        python: the interpreter with its framework.
        limit: seconds, after which it counts as hanging: its stacks are printed and it is ended.
    """
    path = FOLDER / f"{program.name}.py"
    if not path.exists():
        path = folder / "train.py"
        path.write_text(program.text, encoding="utf-8")
    variables = environment(reports)
    command = [python, str(path)]
    if launch.ranks and program.framework == "torch":
        options = ["--standalone", "--nproc-per-node", str(launch.ranks)]
        command = [python, "-m", "torch.distributed.run", *options, str(path)]
    elif launch.ranks:
        options = [f"--worker_num={launch.ranks}", f"--local_worker_num={launch.ranks}", "--join=True"]
        options += [f"--master_port={_free_port()}", f"--log_dir={reports / 'msrun'}"]
        options.append(
            f"--tail_worker_log={launch.ranks}"
        )  # of no rank: each `tail` would outlive a msrun that is killed
        command = [python, "-m", "mindspore.parallel.cluster.run", *options, str(path)]
        variables["PATH"] = os.pathsep.join([str(Path(python).parent), variables.get("PATH", os.defpath)])
    if launch.send:
        holds = 0 if launch.to == "launcher" else launch.to
        variables["PROGRAM_HOLD"] = f"{holds},{launch.step}"
    _started.add(variables[_MARK])
    log = reports / "output"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    exit, seconds = _wait(process, launch, reports, variables[_MARK], limit)
    left = _end(variables[_MARK], at_once=exit is None)
    _started.discard(variables[_MARK])
    text = "".join(path.read_text(errors="replace") for path in [log, *sorted(reports.glob("msrun/worker_*.log"))])
    failed = {int(rank): int(code) for rank, code in [*_TORCHRUN.findall(text), *_MSRUN.findall(text)]}
    return Ended(exit, failed, text, left, seconds)


def _wait(
    process: subprocess.Popen, launch: Launch, reports: Path, mark: str, limit: float
) -> tuple[int | None, float]:
    """Wait for the launcher's end, and send the signal meanwhile; its exit status and CPU seconds."""
    deadline, sent = time.monotonic() + limit, not launch.send
    rank = 0 if launch.to == "launcher" else int(launch.to)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        if not sent and all(_reported(reports, each, launch.step) for each in range(launch.ranks)):
            number = getattr(signal, launch.send)
            if number == signal.SIGINT:  # as a terminal sends it
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid if launch.to == "launcher" else min(_marked(mark, rank)), number)
            (reports / "sent").touch()
            sent = True
        if time.monotonic() > deadline:
            for each in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGABRT)  # faulthandler prints the stacks of all threads
            time.sleep(2)
            _end(mark, at_once=True)
            _, _, usage = os.wait4(process.pid, 0)
            process.returncode = -signal.SIGKILL
            return None, usage.ru_utime + usage.ru_stime
        time.sleep(0.1)


def _reported(reports: Path, rank: int, step: int) -> bool:
    path = reports / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return any(json.loads(line)["step"] == step for line in lines if line.endswith("}"))


def _marked(mark: str, rank: int | None = None) -> list[int]:
    """List the processes of a start; with `rank`, that rank and what it started."""
    found, places = [], {f"RANK={rank}".encode(), f"RANK_ID={rank}".encode()}  # torchrun's, msrun's
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = set(path.read_bytes().split(b"\0"))
            if f"{_MARK}={mark}".encode() in variables and (rank is None or places & variables):
                found.append(int(path.parent.name))
    return found


def _end(mark: str, *, at_once: bool) -> list[str]:
    """Wait for what is left of a start, and end it; the command lines of what did not end by itself."""
    deadline = time.monotonic() + (0.0 if at_once else _GRACE)
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = []
    for pid in _marked(mark):
        with contextlib.suppress(OSError):
            left.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            os.kill(pid, signal.SIGKILL)
    return [] if at_once else left


def end_all() -> None:
    """End what has been started and has not ended."""
    for mark in list(_started):
        _end(mark, at_once=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def busy(processes: int):
    """Keep so many processes computing; they end with this one."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}:\n    sum(range(100000))"
    started = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()
