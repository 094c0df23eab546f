"""Starting and watching ranks by msrun, which writes logs but says neither which rank failed nor why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from hp_plan import ParallelPlan
from hp_platform.extend import divide_threads
from hyper_parallel.launching.launch import Interrupted, Job, RankFailure
from hyper_parallel.mindspore.process import peer_lost
from hyper_parallel.mindspore.rank import JOB, OUTPUT
from hyper_parallel.reports.display import make_reporter
from hyper_parallel.reports.events import EventReader, Tail
from hyper_parallel.supervision.hanging import last_move, watching
from hyper_parallel.supervision.run_end import ended_alike, say_first_interrupt, show_notes

Result = TypeVar("Result")

_POLL = 0.1
# How long a rank that lost another one waits to be blamed, and how long ranks that are done may take to end: msrun
# looks at its processes once a second.
_PATIENCE = 5.0
_MSRUN_SAYS = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")


class _Signalled(Exception):
    """This process got a signal.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def start_server(plan: ParallelPlan, ranks: int) -> None:
    """Set the number of threads; msrun starts each rank as a new program, so nothing is loaded ahead of time."""
    os.environ.setdefault("OMP_NUM_THREADS", str(divide_threads(ranks)))


def launch(work: Callable[[Job], Result], job: Job, *, ranks: int) -> dict[int, Result]:
    """Run `work(job)` on new ranks of this machine, by msrun, and wait for all of them.

    A rank that fails, or a signal to this process, ends all ranks; SIGTERM lets them save a checkpoint first. The run,
    and what rank 0 prints, is shown by this process, which has the terminal: a rank's output is a file.

    Args:
        work: a function at the top of a module.
        job: handed to it.
        ranks: their number.

    Returns:
        What each rank returned.

    Raises:
        RankFailure: a rank raised or was killed.
        Interrupted: this process got SIGINT, SIGTERM or SIGHUP.
    """
    start_server(job.plan, ranks)
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as name, contextlib.ExitStack() as stack:
        folder, plan = Path(name), job.plan
        job, reader = dataclasses.replace(job, flights=folder), None
        if job.folder is not None:
            job = dataclasses.replace(job, events=folder / "events")
            reader = stack.enter_context(EventReader(folder / "events", make_reporter(json_lines=job.json_lines)))
        (folder / JOB).write_bytes(pickle.dumps((work, job)))
        output = Tail(folder / OUTPUT)

        def show() -> None:
            printed = output.read()
            if printed:
                sys.stdout.write(printed)
                sys.stdout.flush()
            if reader is not None:
                reader.poll()

        watched = stack.enter_context(_Msrun(folder, ranks))
        watch = stack.enter_context(watching(folder, ranks, job.hang_after, plan.mesh.axes))
        try:
            with _signals_raise():
                watched.wait(show)
        except RankFailure as error:
            show_notes(job, ranks)
            text = ended_alike(folder, ranks)
            if text is not None:
                raise RankFailure(error.rank, text, alike=True) from None
            hung = None if watch is None else watch.failure
            if hung is None and not _explained(error):
                hung = error.rank, f"{error.reason}{last_move(folder, error.rank, plan.mesh.axes)}"
            if hung is None:
                raise
            raise RankFailure(*hung) from None
        except _Signalled as error:
            if error.number == signal.SIGINT:
                say_first_interrupt()
            if error.number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(_Signalled), _signals_raise():  # a second one ends the ranks at once
                    watched.stop(plan.run.stop_within, show)
            raise Interrupted(error.number) from None
        return {rank: pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(ranks)}


class _Msrun:
    """One run of msrun; on leaving, none of its processes is left.

    Args:
        folder: shared with the ranks, see Note [Files of the ranks].
        ranks: their number.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._log = folder / "msrun.log"

    def __enter__(self) -> _Msrun:
        # msrun starts `python`, whichever comes first.
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        options = [f"--worker_num={self._ranks}", f"--local_worker_num={self._ranks}", "--join=True"]
        options += [f"--master_port={_free_port()}", f"--log_dir={self._folder}"]
        # No rank's log: each `tail` would outlive a msrun that is killed.
        options.append(f"--tail_worker_log={self._ranks}")
        program = ["-m", "hyper_parallel.mindspore.rank"]
        command = [sys.executable, *program, "msrun", str(os.getpid()), _msrun(), *options]
        command += ["python", *program, str(self._folder)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C in a terminal is this process's to handle.
            )
        return self

    def __exit__(self, *error: object) -> None:
        ranks = {*self._pids().values(), *self._children()}
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)  # It then kills its ranks and its scheduler.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        for group in [self._process.pid, *ranks]:  # Each rank leads a process group of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def _children(self) -> list[int]:
        """List the processes of msrun, including those that have not yet said which rank they are."""
        import psutil  # It comes with MindSpore.

        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self._process.pid).children()]
        return []

    def wait(self, between: Callable[[], None]) -> None:
        """Wait until every rank is done.

        Args:
            between: called now and then, and once at the end.

        Raises:
            RankFailure: a rank raised or was killed.
        """
        while True:
            ended = self._process.poll()
            between()
            failure = self._failure(ended is not None)
            if failure is not None:
                between()
                raise failure
            if all((self._folder / f"rank{rank}.result").exists() for rank in range(self._ranks)):
                between()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE)  # Its ranks are done, and end in their own time.
                return
            time.sleep(_POLL)

    def stop(self, within: float, between: Callable[[], None]) -> None:
        """Ask the ranks to stop, by SIGTERM, and wait until they have.

        Args:
            within: seconds that they have for it.
            between: called now and then.
        """
        pids = self._pids()
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + within + _PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            between()
            if all((self._folder / f"rank{rank}.result").exists() for rank in pids):
                return
            time.sleep(_POLL)
        between()

    def _failure(self, ended: bool) -> RankFailure | None:
        """Return the rank that failed first, once that is known."""
        raised = sorted(
            (path.stat().st_mtime, int(path.stem.removeprefix("rank"))) for path in self._folder.glob("rank*.failure")
        )
        for _, rank in raised:
            text = (self._folder / f"rank{rank}.failure").read_text()
            if not peer_lost(RuntimeError(text)):
                return RankFailure(rank, text.rstrip())
        killed = self._killed()
        if killed is not None:
            return killed
        if raised and time.time() - raised[0][0] > _PATIENCE:
            rank = raised[0][1]
            return RankFailure(rank, (self._folder / f"rank{rank}.failure").read_text().rstrip())
        if ended and not raised:
            silent = [rank for rank in range(self._ranks) if not (self._folder / f"rank{rank}.result").exists()]
            if silent:
                reason = f"it ended without a word, and msrun with {self._process.returncode}:\n{_tail(self._log)}"
                return RankFailure(silent[0], reason)
            if self._process.returncode != 0:
                return RankFailure(0, f"msrun ended with {self._process.returncode}:\n{_tail(self._log)}")
        return None

    def _killed(self) -> RankFailure | None:
        """Return the rank that msrun found dead first, if it left no traceback."""
        ranks = {pid: rank for rank, pid in self._pids().items()}
        for pid, code in _MSRUN_SAYS.findall(self._log.read_text(errors="replace")):
            rank = ranks.get(int(pid))
            if rank is None or (self._folder / f"rank{rank}.failure").exists():
                continue
            if int(code) >= 0:
                return RankFailure(rank, f"exit code {code}:\n{_tail(self._folder / f'worker_{rank}.log')}")
            reason = f"killed by {signal.Signals(-int(code)).name} (process {pid})"
            if -int(code) == signal.SIGKILL:
                reason += "; the system does that when memory runs out: take a smaller model or batch, or more ranks"
            return RankFailure(rank, reason)
        return None

    def _pids(self) -> dict[int, int]:
        return {int(path.stem.removeprefix("rank")): int(path.read_text()) for path in self._folder.glob("rank*.pid")}


def _explained(failure: RankFailure) -> bool:
    """Tell whether a rank's error says to its user what to do."""
    return not failure.reason.startswith(("Traceback ", "killed by ", "exit code "))


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise _Signalled(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _msrun() -> str:
    beside = Path(sys.executable).with_name("msrun")
    path = str(beside) if beside.exists() else shutil.which("msrun")
    if path is None:
        raise FileNotFoundError(
            "msrun is not on the PATH; it comes with MindSpore: pip install 'hyper-parallel[mindspore]'"
        )
    return path


def _free_port() -> int:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        return reserved.getsockname()[1]


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
