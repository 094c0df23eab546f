"""Ranks that are no pool's: for tests in which one ends, or joins on its own terms."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["rank_processes"]


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
