"""The rank that the others wait for, found by comparing the flight recorders of a run that hangs.

Note [Who hangs]
    A rank that waits in a collective waits for the ranks of its channel that have not come that far. Followed from rank
    to rank, that ends at one that waits in no collective: it hangs, the others only wait. Where it ends in a circle,
    the ranks wait for each other: they issue collectives in different orders. Ranks that have issued different
    collectives under one number of a channel don't fit together, whoever waits for whom. A device runs collectives
    behind the host, which then waits in none of them; there the ranks are the culprits that all others are ahead of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hp_platform.failures.flight import Channel, Flight, Operation

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
