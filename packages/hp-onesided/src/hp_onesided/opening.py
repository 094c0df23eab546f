"""The meeting of a group's ranks over its backend: what each has, and then each other's memory.

Note [All or none]
    Whether a group's collectives go through shared memory is the same on all of its ranks, whatever one of them lacks.
    So the ranks tell each other twice: what each has, and, where that is enough, whether it could map the others'.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from hp_onesided.carriers.carrier import SharedMemory
from hp_onesided.carriers.levels import TwoLevels
from hp_onesided.carriers.messages import Messages
from hp_onesided.cores.core import Core, Team, core_name
from hp_onesided.cores.counters import counters_by
from hp_onesided.cores.library import library
from hp_onesided.cores.native import NativeCore
from hp_onesided.cores.processes import hold, release
from hp_onesided.cores.python import PythonCore
from hp_onesided.cores.segment import Place, Segment, Shape, allocate, place_of
from hp_onesided.cores.waiting import lacking
from hp_onesided.planning.steps import slot_bytes
from hp_onesided.port import Group, port
from hp_platform import get_group_local_rank, get_process_group_ranks
from hp_platform.extend import Hosts, Level, hosts_of, own_network, platform_name, second_group

Other = TypeVar("Other")
_log = logging.getLogger("hp_onesided")
_said: set[str] = set()
_TEXT = 200  # characters of a problem that others are told


@dataclass(frozen=True)
class _Told:
    """What a rank says of itself.

    Attributes:
        network: names its host.
        core: that it has.
        place: of its memory, as text.
        problem: why it can't share memory; "" if it can.
    """

    network: str
    core: str = ""
    place: str = ""
    problem: str = ""


def open_carrier(group: Group, share: Callable[[bytes], list[bytes]]) -> SharedMemory | TwoLevels | None:
    """Let the ranks of a group share memory, on its host or on each of its hosts, if the group's backend is gloo.

    All ranks call it. Where it can't be done though ranks share a host, one of them logs why, once.

    Args:
        group: of two ranks or more.
        share: returns what each rank says, in the order of the ranks, for what this one says.

    Returns:
        None, on all ranks alike, where the group's backend is to communicate.
    """
    limit = port().limit(group) if platform_name() == "torch" and sys.platform == "linux" else None
    if limit is None:
        return None
    members, rank = get_process_group_ranks(group), get_group_local_rank(group)
    return open_among(members, rank, limit, share, lambda hosts: _open_levels(members, hosts, rank, limit))


def open_among(
    members: Sequence[int],
    rank: int,
    limit: float,
    share: Callable[[bytes], list[bytes]],
    on_several: Callable[[Hosts], Other],
) -> SharedMemory | Other | None:
    """Let ranks share memory, if they are on one host; as `open_carrier` for a group that is only being made.

    Args:
        members: global ranks, two or more.
        rank: this one, among them.
        limit: seconds to wait for a rank.
        share: returns what each rank says.
        on_several: called with the hosts, if they are several; returns what is used then.
    """
    shape = Shape(len(members), slot_bytes(len(members)))
    descriptor, own = _offer(shape)
    try:
        told = [_Told(**json.loads(each)) for each in share(json.dumps(asdict(own)).encode())]
        hosts = hosts_of([each.network for each in told])
        if len(hosts) > 1:
            return on_several(hosts)
        native = all(each.core == "native" for each in told)
        problems = [each.problem or ("" if native else lacking() or "") for each in told]
        team = None
        if descriptor is not None and not any(problems):
            places = [Place.parse(each.place) for each in told]
            problem = ""
            try:
                segments, held = map_all(rank, places, shape.nbytes, descriptor)
                team = Team(rank, segments, shape, [place.pid for place in places], held, limit)
            except OSError as error:
                problem = str(error)
            problems = [each.decode() for each in share(problem.encode())]
    finally:
        if descriptor is not None:
            os.close(descriptor)
    failed = next((index for index, problem in enumerate(problems) if problem), None)
    if failed is not None or team is None:
        if team is not None:
            release(team.pids[peer] for peer in team.processes)
        _say(f"rank {members[failed or 0]}: {problems[failed or 0]}", rank == 0)
        return None
    loaded = library() if native else None
    core: Core = PythonCore(team) if loaded is None else NativeCore(loaded, team)
    counters = counters_by(loaded, team.segments, held)
    return SharedMemory(core, team, members, Messages(team, counters, core.failed))


def _open_levels(members: Sequence[int], hosts: Hosts, rank: int, limit: float) -> TwoLevels | None:
    """Make the groups of two levels: see Note [Two levels] in `hp_onesided.carriers.levels`."""
    sizes = [len(ranks) for ranks in hosts]
    if set(sizes) == {1}:
        return None
    if len(set(sizes)) > 1:
        text = f"hosts of {sizes} ranks: two levels need ranks of equal place, so use as many of each host"
        _say(f"ranks {list(members)} are on {text}", rank == 0, "several hosts")
        return None
    host = next(ranks for ranks in hosts if rank in ranks)
    place = host.index(rank)
    timeout = timedelta(seconds=limit)
    lines: tuple[tuple[Level, Sequence[int]], ...] = ("host", host), ("between", [ranks[place] for ranks in hosts])
    groups: dict[Level, Group] = {}
    for level, line in lines:
        groups[level] = second_group([members[each] for each in line], timeout)
    return TwoLevels(hosts, groups)


def _offer(shape: Shape) -> tuple[int | None, _Told]:
    """Make this rank's memory, and say where it is."""
    core = core_name()
    try:
        if core is None:
            raise OSError(lacking())
        descriptor = allocate(shape.nbytes)
    except OSError as error:
        return None, _Told(own_network(), problem=f"{shape.nbytes} bytes of shared memory: {error}"[:_TEXT])
    return descriptor, _Told(own_network(), core, str(place_of(descriptor)))


def map_all(rank: int, places: Sequence[Place], nbytes: int, descriptor: int) -> tuple[list[Segment], dict[int, int]]:
    """Map the memory of all ranks.

    Args:
        rank: this one, in the group.
        places: of each rank's memory.
        nbytes: of each.
        descriptor: of this rank's.

    Returns:
        The segments by rank, and a descriptor of each other rank's process, held until `release`.

    Raises:
        OSError: that of a rank can't be mapped; nothing is held then.
    """
    held: dict[int, int] = {}
    segments: list[Segment] = []
    for peer, place in enumerate(places):
        try:
            if peer == rank:
                segments.append(Segment(descriptor, nbytes))
            else:
                held[peer] = hold(place.pid)
                segments.append(place.map(nbytes))
        except OSError as error:
            release(places[each].pid for each in held)
            raise OSError(f"memory of rank {peer} of the group: {error}"[:_TEXT]) from None
    return segments, held


def _say(problem: str, speaks: bool, where: str = "one host") -> None:
    """Log once why the backend communicates."""
    if speaks and problem not in _said:
        _log.warning("collectives of ranks on %s go through gloo, not through shared memory: %s", where, problem)
    _said.add(problem)
