"""Launchers: the program that started this process as one of many ranks, and this process on its machine.

Note [Ranks of srun]
    srun tells each task its number, but not where the ranks meet. They meet on the first host of the step, at a port
    made of the numbers of the job and the step, unless MASTER_ADDR and MASTER_PORT say otherwise. One task is a world
    of its own, as a shell that srun has started is.

Note [No orphans]
    A launcher that is killed by SIGKILL cannot end its ranks, and a rank that waits in a collective runs no Python that
    could notice. On Linux the kernel does it: a process may ask for a signal when its parent ends. The signal is sent
    when the parent's *thread* ends, so this is for ranks that our own launcher starts from its main thread. A rank
    forked from multiprocessing's server has the server for its parent, which ends with the launcher. In addition, and
    for all other ranks, a thread watches the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

_COMMANDS = {
    "torch": "torchrun --standalone --nproc-per-node {0}",
    "mindspore": "msrun --worker_num={0} --local_worker_num={0}",
}
_PORTS = range(20_000, 32_000)  # below those that systems give away
_SUMMARY = "_summary_for_torchrun"
_PATIENCE = 10.0  # seconds, less than those in which a lost rank is waited for


@dataclass(frozen=True)
class Place:
    """Place of a process among the ranks.

    Attributes:
        rank: in the world; -1 is msrun's scheduler, a process that runs the same program and is not a rank.
        world_size: the number of ranks.
        local_rank: among those of this machine.
        local_world_size: the number of ranks on this machine.
        meeting: host and port where the ranks meet, where the framework doesn't know of it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    meeting: tuple[str, int] | None = None


def launcher_place() -> Place | None:
    """Return this process's place among the ranks; None if no launcher has started it."""
    at = os.environ
    if "RANK" in at and "WORLD_SIZE" in at:
        rank, size = int(at["RANK"]), int(at["WORLD_SIZE"])
        return Place(rank, size, int(at.get("LOCAL_RANK", "0")), int(at.get("LOCAL_WORLD_SIZE", str(size))))
    if at.get("MS_ROLE") in ("MS_WORKER", "MS_SCHED") and "MS_WORKER_NUM" in at:
        size = int(at["MS_WORKER_NUM"])
        rank = int(at.get("RANK_ID", "0")) if at["MS_ROLE"] == "MS_WORKER" else -1
        # msrun tells a process its device, and not how many its machine has.
        return Place(rank, size, int(at.get("DEVICE_ID", "0")), size)
    return _place_in_step(at)


def inside_launcher() -> bool:
    """Return True if this process is a rank of a launcher's."""
    return launcher_place() is not None


def half_launched() -> bool:
    """Return True if some of what a launcher sets is there, but not all: the framework says what is missing."""
    return launcher_place() is None and not {"RANK", "WORLD_SIZE", "MS_ROLE"}.isdisjoint(os.environ)


def speaks_for_ranks() -> bool:
    """Return True if this process says what is wrong with all ranks, so that where they write together has it once.

    It is the first rank of each machine under torchrun, rank 0 under srun, each under msrun, with a log a rank.
    """
    place = launcher_place()
    if place is None or (place.meeting is None and "RANK" not in os.environ):
        return True
    return (place.local_rank if place.meeting is None else place.rank) == 0


def leave_to_speaker() -> None:
    """Leave an error of all ranks to the one that speaks for them: its end makes the launcher end this one, too.

    Returns on the rank that speaks. Elsewhere the process ends here, with 1, unless nothing has ended it after ten
    seconds: then the error is this rank's alone, and this rank says it.
    """
    if not speaks_for_ranks():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(_PATIENCE)


def tell_torchrun(text: str) -> None:
    """Write an error where torchrun looks for it, so that its last lines have it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def say_once(error: Exception, summary: str) -> None:
    """Say an error that all ranks raise alike once and without its traceback, if nothing catches it.

    The rank that speaks for the others prints it, the others end with the same status. Without a launcher nothing is
    changed, nor for any other error.

    Args:
        error: about to be raised on every rank; that it is the same on all is the caller's to know.
        summary: of one line, for torchrun's own report.
    """
    if launcher_place() is None:
        return
    if not isinstance(sys.excepthook, _SayingOnce):
        sys.excepthook = _SayingOnce(sys.excepthook)
    vars(error)[_SUMMARY] = summary  # in the error, whose traceback holds a model, and not the other way round


class _SayingOnce:
    """Hook for uncaught errors; those that `say_once` was not called with are the previous hook's."""

    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        summary = vars(error).get(_SUMMARY)
        if summary is not None:
            leave_to_speaker()
            if speaks_for_ranks():
                sys.stderr.write(f"{kind.__name__} on all ranks: {error}\n")
                sys.stderr.flush()
                tell_torchrun(summary)
                return
        self._previous(kind, error, traceback)


def launch_command(platform: str, ranks: int) -> str:
    """Return the command that starts so many ranks on this machine, but for the program.

    >>> launch_command("torch", 4)
    'torchrun --standalone --nproc-per-node 4'
    """
    return _COMMANDS[platform].format(ranks)


def _place_in_step(at: Mapping[str, str]) -> Place | None:
    """See Note [Ranks of srun]."""
    if int(at.get("SLURM_STEP_NUM_TASKS", "1")) == 1 or "SLURM_PROCID" not in at:
        return None
    job, step = (int(at.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    host = at.get("MASTER_ADDR") or _first_host(at["SLURM_STEP_NODELIST"])
    port = int(at.get("MASTER_PORT") or _PORTS[(job + 97 * step) % len(_PORTS)])
    counts = _counts(at["SLURM_STEP_TASKS_PER_NODE"])
    return Place(
        rank=int(at["SLURM_PROCID"]),
        world_size=int(at["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(at["SLURM_LOCALID"]),
        local_world_size=counts[int(at.get("SLURM_NODEID", "0"))],
        meeting=(host, port),
    )


def _first_host(hosts: str) -> str:
    """Return the first of SLURM's list.

    >>> _first_host("gpu[07-09,12],login1")
    'gpu07'
    >>> _first_host("a1-[3,5]-x,b")
    'a1-3-x'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None  # it matches nothing, too
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _counts(tasks: str) -> list[int]:
    """Return the number of tasks of each node.

    >>> _counts("4(x2),3")
    [4, 4, 3]
    """
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(count) for count, times in pairs for _ in range(int(times or "1"))]


def break_connections(*, keep_ports: Collection[int] = ()) -> None:
    """Shut down this process's TCP connections, so that whoever waits at their other ends hears of it (on Linux).

    Args:
        keep_ports: connections from or to these stay.
    """
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    ports = {connection.getsockname()[1], connection.getpeername()[1]}
                    if not ports & set(keep_ports):
                        connection.shutdown(socket.SHUT_RDWR)


def wait_for_threads(name: str, limit: float = 10.0) -> None:
    """Wait until a backend's threads of this process have nothing to do any more (on Linux).

    A thread that has something to do is runnable, or becomes so when this one lets go of the interpreter: it is looked
    at several times, as this one may take the interpreter back before the other was scheduled.

    Args:
        name: of the threads, as Linux knows it.
        limit: seconds; a thread that computes without end is not waited for.
    """
    if sys.platform != "linux":
        return
    deadline, idle = time.monotonic() + limit, 0
    while idle < 5 and time.monotonic() < deadline:
        idle = 0 if any(state == "R" for state in _states_of_threads(name)) else idle + 1
        time.sleep(0.001)


def _states_of_threads(name: str) -> Iterator[str]:
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            own, _, rest = Path(f"/proc/self/task/{number}/stat").read_text().partition(" (")[2].rpartition(") ")
            if own == name:
                yield rest[0]


def memory_bytes() -> int:
    """Get how much memory this machine has, or this process's control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
            total = min(total, int(Path(limit).read_text()))
    return total


def usable_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_threads(ranks: int) -> int:
    """Return the number of threads for each rank on this machine: together no more than there are cores.

    Args:
        ranks: of this machine.
    """
    return max(1, usable_cores() // ranks)


def processor_name() -> str:
    """Get the name of this machine's processor as its maker calls it, else its architecture."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def peak_resident_bytes() -> int:
    """Get the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_resident_bytes() -> None:
    """Start the peak over where the system can (Linux), else it stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


_PR_SET_PDEATHSIG = 1
_POLL = 0.5


def end_with_parent() -> None:
    """End this process by SIGKILL when its parent's thread that started it ends: see Note [No orphans]."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watch_parent()


def watch_parent() -> None:
    """End this process once the one that started it has ended, if it still runs Python."""
    parent, number = multiprocessing.parent_process(), os.getppid()

    def ended() -> None:
        while os.getppid() == number:
            time.sleep(_POLL)

    def server_ended() -> None:
        assert parent is not None
        wait([parent.sentinel])

    def watch(until: Callable[[], None]) -> None:
        until()
        os._exit(1)

    threading.Thread(
        target=watch, args=(ended if parent is None else server_ended,), name="watch-parent", daemon=True
    ).start()
