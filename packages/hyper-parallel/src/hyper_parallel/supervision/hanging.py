"""Runs that don't go on: the launcher sees it, says who holds them up and where, and ends that rank.

Note [Ending a hang]
    The watch is a thread of the process that started the ranks, so it lives on whatever a rank does. It reads their
    flight recorders (`hp_platform.failures.flight`). Where no rank of a run has moved for too long, it has all ranks
    write their stacks and kills the culprits: what hangs becomes what ends, the connections of a killed process break,
    and the others go on as after any lost rank. A rank that was stopped is continued for its stack, and stopped again:
    if the run has come to its end meanwhile, the rank is let go.

    Who waits for a rank that has ended, without an error that its launcher would hear of, is killed in its place.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hp_platform.extend import (
    Flight,
    ask_for_stacks,
    describe_hang,
    find_hang,
    has_ended,
    last_operation,
    process_state,
    read_flight,
    send_signal,
)

_PATIENCE = 6  # times the limit: for the start, with the first step, for saves, validations and the end


class Watch:
    """A watch over the ranks of this machine; a context manager.

    Args:
        folder: of the ranks' flight recorders.
        ranks: their number.
        hang_after: seconds without a move; more at the start, in a save or a validation, and at the end.
        axes: of the mesh, name to size, to name a group by.

    Attributes:
        failure: the rank that hung and what is known of it, None without one.
    """

    def __init__(self, folder: Path, ranks: int, hang_after: float, axes: Mapping[str, int]) -> None:
        self.failure: tuple[int, str] | None = None
        self._folder, self._ranks, self._limit, self._axes = folder, ranks, hang_after, axes
        self._poll = min(1.0, hang_after / 10)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hyper-parallel watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        seen: list[bytes] = []
        idle = 0.0
        before = time.monotonic()
        while not self._over.wait(self._poll):
            now = time.monotonic()
            # This process may have been stopped along with the ranks: time that it hasn't seen doesn't count.
            passed, before = min(now - before, 2 * self._poll), now
            content = [self._content(rank) for rank in range(self._ranks)]
            idle, seen = idle + passed if content == seen else 0.0, content
            if idle >= self._limit and self._hangs(idle):
                return

    def _content(self, rank: int) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"rank-{rank}.flight").read_bytes()
        return b""

    def _hangs(self, idle: float) -> bool:
        """End the culprits of a hang, if it is one; tell whether there is nothing more to watch."""
        read = {rank: read_flight(self._folder, rank) for rank in range(self._ranks)}
        flights = {rank: flight for rank, flight in read.items() if flight is not None}
        if len(flights) < self._ranks:  # some have not started
            return False
        states = {rank: process_state(flight.pid) for rank, flight in flights.items()}
        living = [rank for rank, state in states.items() if not has_ended(state)]
        if not living:
            return False
        # Of a rank that has ended with an error its launcher hears, and ends the others.
        patient = len(living) < len(flights) or any(flight.phase != "step" for flight in flights.values())
        if idle < self._limit * (_PATIENCE if patient else 1):
            return False
        hang = find_hang(flights)
        stopped = [rank for rank in hang.culprits if states[rank] == "T"]
        asked = [rank for rank in living if states[rank] != "T" or rank in stopped]
        stacks = ask_for_stacks(self._folder, flights, asked, stopped)
        if stopped and self._ends(flights, living):
            send_signal(flights, stopped, signal.SIGCONT)
            return False
        told = describe_hang(hang, flights, states, stacks, self._axes)
        text = f"the run hung: for {idle:.0f} s no rank went on (run.hang_after); {told}"
        self.failure = hang.culprits[0], text
        culprits = [rank for rank in hang.culprits if rank in living]
        send_signal(flights, culprits or living, signal.SIGKILL)
        return True

    def _ends(self, flights: Mapping[int, Flight], living: Sequence[int]) -> bool:
        """Tell whether a run whose stopped ranks were continued has come to its end meanwhile."""
        for rank in living:
            now = read_flight(self._folder, rank)
            if now is None or now.phase == "end" != flights[rank].phase or has_ended(process_state(now.pid)):
                return True
        return False


@contextlib.contextmanager
def watching(folder: Path, ranks: int, hang_after: float, axes: Mapping[str, int]) -> Iterator[Watch | None]:
    """Watch over ranks in a block; with ``hang_after`` 0 don't."""
    if not hang_after:
        yield None
        return
    with Watch(folder, ranks, hang_after, axes) as watch:
        yield watch


def last_move(folder: Path, rank: int, axes: Mapping[str, int]) -> str:
    """Tell what a rank that has ended did last; "" of one that had not begun.

    Args:
        folder: of the ranks' flight recorders.
        rank: which.
        axes: of the mesh.
    """
    flight = read_flight(folder, rank)
    if flight is None:
        return ""
    return f"\nIt was in step {flight.step + 1} ({flight.phase}), {last_operation(flight, axes)}"
