"""This machine, and this process under the one that started it.

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
import multiprocessing
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import wait
from pathlib import Path


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
