"""Hangs: the rank that the others wait for, found in the flight recorders, and the report that names it.

Note [Who hangs]
    A rank that waits in a collective waits for the ranks of its channel that have not come that far. Followed from rank
    to rank, that ends at one that waits in no collective: it hangs, the others only wait. Where it ends in a circle,
    the ranks wait for each other: they issue collectives in different orders. Ranks that have issued different
    collectives under one number of a channel don't fit together, whoever waits for whom. A device runs collectives
    behind the host, which then waits in none of them; there the ranks are the culprits that all others are ahead of.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hp_platform.failures.flight import Channel, Flight, Operation, flight_stack

_SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # of as many bytes on every rank


@dataclass(frozen=True, slots=True)
class Hang:
    """Why a run does not go on.

    Attributes:
        kind: "behind": the culprits have not come to a collective that the others wait in; "circle": they wait for each
            other; "different": they have issued different collectives; "unknown": nobody waits, and nobody is behind.
        culprits: global ranks, ascending.
        waits: the collectives that ranks wait in, by rank.
        next: the collective that a culprit has not come to; None without one.
        issued: of "different", the collectives under one number, by rank.
    """

    kind: Literal["behind", "circle", "different", "unknown"]
    culprits: tuple[int, ...]
    waits: Mapping[int, Operation]
    next: Operation | None = None
    issued: Mapping[int, Operation] = field(default_factory=dict)


def find_hang(flights: Mapping[int, Flight]) -> Hang:
    """Find the ranks that a run waits for.

    Args:
        flights: of the ranks that can be asked, by rank.
    """
    waits = {rank: operation for rank, flight in flights.items() if (operation := _waited(flight)) is not None}
    issued = _different(flights)
    if issued:
        return Hang("different", _few(issued), waits, issued=issued)
    behind = {rank: _missing(operation, rank, flights) for rank, operation in waits.items()}
    culprits = sorted({rank for ranks in behind.values() for rank in ranks if rank not in waits})
    if culprits:
        wanted = next(waits[rank] for rank, ranks in sorted(behind.items()) if culprits[0] in ranks)
        return Hang("behind", tuple(culprits), waits, wanted)
    circle = _circle(behind)
    if circle:
        return Hang("circle", circle, waits)
    last = _last(flights)
    return Hang("behind" if last else "unknown", last or tuple(sorted(flights)), waits)


def _waited(flight: Flight) -> Operation | None:
    """Return the collective that a rank waits in."""
    if flight.waiting is None:
        return None
    channel, number = flight.waiting
    return flight.operation(channel, number) or Operation("collective", channel, number, 0)


def _missing(operation: Operation, rank: int, flights: Mapping[int, Flight]) -> tuple[int, ...]:
    """List the ranks that have not begun a collective."""
    others = (other for other in operation.channel.ranks if other != rank and other in flights)
    return tuple(other for other in others if flights[other].begun.get(operation.channel, 0) < operation.number)


def _different(flights: Mapping[int, Flight]) -> dict[int, Operation]:
    """Return what each rank issued under one number of a channel, where that differs: the first such collective."""
    issued: dict[tuple[Channel, int], dict[int, Operation]] = {}
    for rank, flight in flights.items():
        for operation in flight.last:
            if not operation.channel.messages:
                issued.setdefault((operation.channel, operation.number), {})[rank] = operation
    return next((by_rank for by_rank in issued.values() if len(set(map(_what, by_rank.values()))) > 1), {})


def _what(operation: Operation) -> tuple[str, int]:
    return operation.kind, operation.bytes if operation.kind in _SIZED else 0


def _few(issued: Mapping[int, Operation]) -> tuple[int, ...]:
    """List the ranks that issued what the fewest did, all where as many issued one thing as the other."""
    alike: dict[tuple[str, int], list[int]] = {}
    for rank, operation in issued.items():
        alike.setdefault(_what(operation), []).append(rank)
    kinds = sorted(alike.values(), key=len)
    few = kinds[:-1] if len(kinds[-1]) > len(kinds[-2]) else kinds
    return tuple(sorted(rank for ranks in few for rank in ranks))


def _circle(behind: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """List ranks that wait for each other, as in ``{0: (1,), 1: (0,), 2: (0,)}`` the ranks 0 and 1."""
    inside = {rank: ranks for rank, ranks in behind.items() if ranks}
    if not inside:
        return ()
    path = [min(inside)]
    while True:
        following = [rank for rank in inside.get(path[-1], ()) if rank in inside]
        if not following:
            return ()
        if following[0] in path:
            return tuple(sorted(path[path.index(following[0]) :]))
        path.append(following[0])


def _last(flights: Mapping[int, Flight]) -> tuple[int, ...]:
    """List the ranks that others are ahead of on a channel, and that are ahead of nobody."""
    behind, ahead = set(), set()
    for channel in {channel for flight in flights.values() for channel in flight.begun}:
        numbers = {rank: flights[rank].begun.get(channel, 0) for rank in channel.ranks if rank in flights}
        most, least = max(numbers.values()), min(numbers.values())
        if most > least and not channel.messages:
            behind |= {rank for rank, number in numbers.items() if number < most}
            ahead |= {rank for rank, number in numbers.items() if number > least}
    return tuple(sorted(behind - ahead))


_STACKS = 5.0  # seconds for ranks to write theirs
_LINES = 24
_NO_AXES: Mapping[str, int] = {}


def describe_hang(
    hang: Hang,
    flights: Mapping[int, Flight],
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    axes: Mapping[str, int] = _NO_AXES,
) -> str:
    """Tell who holds up ranks, in which collective, and where: a sentence, then lines.

    Args:
        hang: who.
        flights: of all ranks.
        states: of their processes, as `process_state` names them.
        stacks: what they wrote of their stacks; of a rank that was not asked nothing.
        axes: of the mesh, name to size, to name a group by.
    """
    lines = [_cause(hang, flights, states, axes)]
    for rank, operation in sorted(hang.waits.items()):
        where = _innermost(stacks.get(rank, ""))
        lines.append(f"rank {rank} waits in {_named(operation, axes)}{where and f', at {where}'}")
    for rank in hang.culprits[:4]:
        if rank not in hang.waits and not has_ended(states[rank]):
            lines.append(
                f"rank {rank} waits in no collective; the last that it began was {_newest(flights[rank], axes)}"
            )
    for rank in hang.culprits[:4]:
        stack = stacks.get(rank, "").rstrip().splitlines()[:_LINES]
        text = "\n".join(stack) or "  (it wrote none, as a process that waits in the kernel)"
        flight = flights[rank]
        # A loop of one's own tells of no steps.
        step = f", in step {flight.step + 1} ({flight.phase})" if flight.step or flight.phase != "start" else ""
        lines.append(f"Stack of rank {rank}{step}:\n{text}")
    return "\n".join(lines)


def last_operation(flight: Flight, axes: Mapping[str, int] = _NO_AXES) -> str:
    """Tell which collective a rank is in, as "in all_reduce number 7 ...", or was in last, as "after ...".

    Args:
        flight: of the rank.
        axes: of the mesh.
    """
    operation = None if flight.waiting is None else flight.operation(*flight.waiting)
    return f"after {_newest(flight, axes)}" if operation is None else f"in {_named(operation, axes)}"


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
    if all(has_ended(states[rank]) for rank in hang.culprits):
        how = f" {'have' if several else 'has'} ended and"
    if hang.next is not None:
        return f"{who}{how} {'have' if several else 'has'} not come to {_named(hang.next, axes)}"
    if hang.kind == "behind":
        return (
            f"{who}{how} {verb} behind the others; the last collective was {_newest(flights[hang.culprits[0]], axes)}"
        )
    return f"{who}{how} {verb} in no collective"


def _newest(flight: Flight, axes: Mapping[str, int]) -> str:
    return _named(flight.last[-1], axes) if flight.last else "none"


def _named(operation: Operation, axes: Mapping[str, int]) -> str:
    """Name a collective, as "all_reduce number 7 over ranks [0, 1] (axis tp, 64 bytes)"."""
    ranks, number = operation.channel.ranks, operation.channel.number
    if operation.channel.messages:
        return (
            f"{operation.kind} number {operation.number} from rank {ranks[0]} to {ranks[1]} ({operation.bytes} bytes)"
        )
    among = f"{list(ranks)}" if len(ranks) <= 16 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} ranks)"
    group = f"group {number + 1} of these ranks, " if number else ""
    return (
        f"{operation.kind} number {operation.number} over ranks {among}"
        f" ({axis_of(ranks, axes)}{group}{operation.bytes} bytes)"
    )


def axis_of(ranks: Sequence[int], axes: Mapping[str, int]) -> str:
    """Name the axis of a mesh whose group some ranks are, followed by a comma; "" where they are of none.

    >>> axis_of((0, 2), {"dp_shard": 2, "tp": 2})
    'axis dp_shard, '

    Args:
        ranks: ascending global ranks.
        axes: of the mesh, outermost first.
    """
    stride = 1
    for name, size in reversed(list(axes.items())):
        first = ranks[0] - ranks[0] // stride % size * stride
        if list(ranks) == list(range(first, first + size * stride, stride)):
            return f"axis {name}, "
        stride *= size
    return ""


def _innermost(stack: str) -> str:
    """Return the file and line of a stack's first frame outside of the collectives."""
    for line in stack.splitlines():
        file, _, rest = line.strip().partition('", line ')
        if rest and "hp_platform" not in file:
            return f"{file.removeprefix('File ').lstrip(chr(34))}:{rest.split(' ')[0]}"
    return ""


def ask_for_stacks(
    folder: Path, flights: Mapping[int, Flight], asked: Sequence[int], stopped: Sequence[int] = ()
) -> dict[int, str]:
    """Have ranks of this machine write their stacks, and return them.

    Args:
        folder: of the flight recorders.
        flights: of the ranks.
        asked: the ranks, whose processes live.
        stopped: those of them that are stopped, which go on for it and are stopped again.
    """
    send_signal(flights, asked, signal.SIGUSR1)
    send_signal(flights, stopped, signal.SIGCONT)
    try:
        _await_stacks(folder, asked)
    finally:
        send_signal(flights, stopped, signal.SIGSTOP)
    return {rank: flight_stack(folder, rank) for rank in asked}


def _await_stacks(folder: Path, asked: Sequence[int]) -> None:
    deadline, before = time.monotonic() + _STACKS, [[0]] * 3
    while time.monotonic() < deadline:
        now = [len(flight_stack(folder, rank)) for rank in asked]
        if all(now) and all(each == now for each in before):
            return  # nothing more comes
        before = [*before[1:], now]
        time.sleep(0.1)


def send_signal(flights: Mapping[int, Flight], ranks: Iterable[int], number: int) -> None:
    """Send a signal to the processes of ranks that live."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(flights[rank].pid, number)


def has_ended(state: str) -> bool:
    """Tell whether a process that is in a state of `process_state` runs no more."""
    return state in ("", "Z")


def process_state(pid: int) -> str:
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
