"""Ranks that are no pool's: for tests in which one ends, or joins on its own terms; and programs that start ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def rank_processes(
    main: Callable[..., None], ranks: int, *args: Any, preload: Sequence[str] = ()
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Start a process for each rank; in the end all are killed and waited for, and their connections closed.

    Args:
        main: called in each process with its end of a pipe, its rank, ``args`` and this process's environment.
        ranks: how many.
        *args: pickled.
        preload: modules that the processes find imported; none leaves the server of processes as it is.

    Yields:
        The processes and this process's ends of the pipes, by rank.
    """
    context = multiprocessing.get_context("forkserver")
    if preload:
        context.set_forkserver_preload(list(preload))
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        for rank in range(ranks):
            here, there = context.Pipe()
            processes.append(context.Process(target=main, args=(there, rank, *args, dict(os.environ))))
            processes[-1].start()
            there.close()
            connections.append(here)
        yield processes, connections
    finally:
        for process in processes:
            process.kill()
            process.join()
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill a program and all that it has started, as torchrun and msrun do start ranks, however the block ends.

    Args:
        process: of the program, which leads a session of its own.
    """
    try:
        yield process
    finally:
        if process.poll() is None:
            for each in [process.pid, *_descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whom a child that has ended left behind
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _descendants(process: int) -> list[int]:
    """List the processes that a process has started, and those that these have (on Linux)."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(") ")[2].split()[1])
    found = [process]
    for parent in found:  # which grows
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def processor_seconds(sessions: Collection[int]) -> float:
    """Return the processor time of the living processes of some sessions, in seconds; 0 where there is no /proc.

    Args:
        sessions: process ids of the sessions' leaders.
    """
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()  # from the third on, as proc(5) numbers them
            if int(fields[3]) in sessions:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
