"""Runs that don't go on: the launcher sees it, says who holds them up and where, and ends that rank.

Note [Ending a hang]
    The watch is a thread of the process that started the ranks, so it lives on whatever a rank does. It reads their
    flight recorders (`hp_platform.flight`). Where no rank of a run has moved for too long, it has all ranks write their
    stacks and kills the culprits: what hangs becomes what ends, the connections of a killed process break, and the
    others go on as after any lost rank. A rank that was stopped is continued for its stack, and stopped again: if the
    run has come to its end meanwhile, the rank is let go.

    Who waits for a rank that has ended, without an error that its launcher would hear of, is killed in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hp_platform.extend import Flight, Hang, Operation, find_hang, flight_stack, read_flight

__all__ = ["Watch", "axis_of", "last_move", "watching"]

_PATIENCE = 6  # times the limit: for the start, with the first step, for saves, validations and the end
_STACKS = 5.0
_LINES = 24
_ENDED = ("", "Z")  # states of a process


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
        states = {rank: _state(flight.pid) for rank, flight in flights.items()}
        living = [rank for rank, state in states.items() if state not in _ENDED]
        if not living:
            return False
        # Of a rank that has ended with an error its launcher hears, and ends the others.
        patient = len(living) < len(flights) or any(flight.phase != "step" for flight in flights.values())
        if idle < self._limit * (_PATIENCE if patient else 1):
            return False
        hang = find_hang(flights)
        stopped = [rank for rank in hang.culprits if states[rank] == "T"]
        self._ask_for_stacks(flights, [rank for rank in living if states[rank] != "T" or rank in stopped], stopped)
        if stopped and self._ends(flights, living):
            _signal(flights, stopped, signal.SIGCONT)
            return False
        stacks = {rank: flight_stack(self._folder, rank) for rank in flights}
        self.failure = (hang.culprits[0], describe(hang, flights, states, stacks, idle, self._axes))
        culprits = [rank for rank in hang.culprits if rank in living]
        _signal(flights, culprits or living, signal.SIGKILL)
        return True

    def _ends(self, flights: Mapping[int, Flight], living: Sequence[int]) -> bool:
        """Tell whether a run whose stopped ranks were continued has come to its end meanwhile."""
        for rank in living:
            now = read_flight(self._folder, rank)
            if now is None or now.phase == "end" != flights[rank].phase or _state(now.pid) in _ENDED:
                return True
        return False

    def _ask_for_stacks(self, flights: Mapping[int, Flight], asked: Sequence[int], stopped: Sequence[int]) -> None:
        """Have ranks write their stacks; those that are stopped go on for it, and are stopped again."""
        _signal(flights, asked, signal.SIGUSR1)
        _signal(flights, stopped, signal.SIGCONT)
        try:
            self._await_stacks(asked)
        finally:
            _signal(flights, stopped, signal.SIGSTOP)

    def _await_stacks(self, asked: Sequence[int]) -> None:
        deadline, before = time.monotonic() + _STACKS, [[0]] * 3
        while time.monotonic() < deadline:
            now = [len(flight_stack(self._folder, rank)) for rank in asked]
            if all(now) and all(each == now for each in before):
                return  # nothing more comes
            before = [*before[1:], now]
            time.sleep(0.1)


@contextlib.contextmanager
def watching(folder: Path, ranks: int, hang_after: float, axes: Mapping[str, int]) -> Iterator[Watch | None]:
    """Watch over ranks in a block; with ``hang_after`` 0 don't."""
    if not hang_after:
        yield None
        return
    with Watch(folder, ranks, hang_after, axes) as watch:
        yield watch


def describe(
    hang: Hang,
    flights: Mapping[int, Flight],
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    seconds: float,
    axes: Mapping[str, int],
) -> str:
    """Tell who holds up a run, in which collective, and where.

    Args:
        hang: who.
        flights: of all ranks.
        states: of their processes, as Linux names them.
        stacks: what they wrote of their stacks.
        seconds: since the last move of a rank.
        axes: of the mesh.
    """
    lines = [
        f"the run hung: for {seconds:.0f} s no rank went on (run.hang_after); {_cause(hang, flights, states, axes)}"
    ]
    for rank, operation in sorted(hang.waits.items()):
        where = _innermost(stacks[rank])
        lines.append(f"rank {rank} waits in {_named(operation, axes)}{where and f', at {where}'}")
    for rank in hang.culprits[:4]:
        stack = stacks[rank].rstrip().splitlines()[:_LINES]
        text = "\n".join(stack) or "  (it wrote none, as a process that waits in the kernel)"
        lines.append(f"Stack of rank {rank}, in step {flights[rank].step + 1} ({flights[rank].phase}):\n{text}")
    return "\n".join(lines)


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
    operation = _waited(flight)
    doing = f"after {_newest(flight, axes)}" if operation is None else f"in {_named(operation, axes)}"
    return f"\nIt was in step {flight.step + 1} ({flight.phase}), {doing}"


def _waited(flight: Flight) -> Operation | None:
    return None if flight.waiting is None else flight.operation(*flight.waiting)


def _cause(hang: Hang, flights: Mapping[int, Flight], states: Mapping[int, str], axes: Mapping[str, int]) -> str:
    several = len(hang.culprits) > 1
    who = f"rank{'s' if several else ''} {', '.join(map(str, hang.culprits))}"
    if hang.kind == "different":
        issued = "; ".join(f"rank {rank}: {_named(each, axes)}" for rank, each in sorted(hang.issued.items()))
        return f"{who} issued another collective than the others: {issued}"
    if hang.kind == "circle":
        return f"{who} wait for each other: they issue collectives in different orders"
    verb = "are" if several else "is"
    stopped = [rank for rank in hang.culprits if states[rank] == "T"]
    how = f" {verb} stopped (SIGSTOP) and" if stopped == list(hang.culprits) else ""
    if all(states[rank] in _ENDED for rank in hang.culprits):
        how = f" {'have' if several else 'has'} ended and"
    if hang.next is not None:
        return f"{who}{how} {'have' if several else 'has'} not come to {_named(hang.next, axes)}"
    if hang.kind == "behind":
        return (
            f"{who}{how} {verb} behind the others; the last collective was {_newest(flights[hang.culprits[0]], axes)}"
        )
    return f"{who}{how} {verb} in no collective"


def _newest(flight: Flight, axes: Mapping[str, int]) -> str:
    return _named(flight.last[-1], axes) if flight.last else "no collective"


def _named(operation: Operation, axes: Mapping[str, int]) -> str:
    """Name a collective, as "all_reduce number 7 over ranks [0, 1] (axis tp, 64 bytes)"."""
    ranks = operation.channel.ranks
    if operation.channel.messages:
        return (
            f"{operation.kind} number {operation.number} from rank {ranks[0]} to {ranks[1]} ({operation.bytes} bytes)"
        )
    axis = axis_of(ranks, axes)
    among = f"{list(ranks)}" if len(ranks) <= 16 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} ranks)"
    return f"{operation.kind} number {operation.number} over ranks {among} ({axis}{operation.bytes} bytes)"


def axis_of(ranks: tuple[int, ...], axes: Mapping[str, int]) -> str:
    """Name the axis of a mesh whose group some ranks are, followed by a comma; "" where they are of none.

    >>> axis_of((0, 2), {"dp_shard": 2, "tp": 2})
    'axis dp_shard, '

    Args:
        ranks: ascending global ranks.
        axes: of the mesh, outermost first.
    """
    mesh = np.arange(int(np.prod(list(axes.values())))).reshape(tuple(axes.values()))
    for number, name in enumerate(axes):
        if list(ranks) in np.moveaxis(mesh, number, -1).reshape(-1, mesh.shape[number]).tolist():
            return f"axis {name}, "
    return ""


def _innermost(stack: str) -> str:
    """Return the file and line of a stack's first frame outside of the collectives."""
    for line in stack.splitlines():
        file, _, rest = line.strip().partition('", line ')
        if rest and "hp_platform" not in file:
            return f"{file.removeprefix('File ').lstrip(chr(34))}:{rest.split(' ')[0]}"
    return ""


def _signal(flights: Mapping[int, Flight], ranks: Iterable[int], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(flights[rank].pid, number)


def _state(pid: int) -> str:
    """Return the state of a process as Linux names it: "T" is stopped, "Z" has ended; "" without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "?" if _lives(pid) else ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
