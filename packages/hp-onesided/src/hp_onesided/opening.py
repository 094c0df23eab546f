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

from hp_onesided.carrier import SharedMemory
from hp_onesided.cores.core import Core, Team, core_name
from hp_onesided.cores.library import library
from hp_onesided.cores.native import NativeCore
from hp_onesided.cores.processes import hold, release
from hp_onesided.cores.python import PythonCore
from hp_onesided.cores.segment import Place, Segment, Shape, allocate, place_of
from hp_onesided.cores.waiting import lacking
from hp_onesided.planning.steps import slot_bytes
from hp_onesided.planning.topology import hosts_of
from hp_onesided.port import Group, port
from hp_platform import get_group_local_rank, get_process_group_ranks
from hp_platform.extend import own_network, platform_name

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


def open_carrier(group: Group, share: Callable[[bytes], list[bytes]]) -> SharedMemory | None:
    """Let the ranks of a group share memory, if they are on one host and the group's backend is gloo.

    All ranks call it. Where it can't be done though they share a host, one of them logs why, once.

    Args:
        group: of two ranks or more.
        share: returns what each rank says, in the order of the ranks, for what this one says.

    Returns:
        None, on all ranks alike, where the group's backend is to communicate.
    """
    limit = port().limit(group) if platform_name() == "torch" and sys.platform == "linux" else None
    if limit is None:
        return None
    members = tuple(get_process_group_ranks(group))
    rank, shape = get_group_local_rank(group), Shape(len(members), slot_bytes(len(members)))
    descriptor, own = _offer(shape)
    try:
        told = [_Told(**json.loads(each)) for each in share(json.dumps(asdict(own)).encode())]
        if len(hosts_of([each.network for each in told])) > 1:
            return None
        native = all(each.core == "native" for each in told)
        problems = [each.problem or ("" if native else lacking() or "") for each in told]
        team = None
        if descriptor is not None and not any(problems):
            places = [Place.parse(each.place) for each in told]
            team, problem = _map(rank, places, shape, limit, descriptor)
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
    return SharedMemory(core, team, members)


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


def _map(rank: int, places: Sequence[Place], shape: Shape, limit: float, descriptor: int) -> tuple[Team | None, str]:
    """Map the memory of all ranks; else say why not."""
    held: dict[int, int] = {}
    segments: list[Segment] = []
    for peer, place in enumerate(places):
        try:
            if peer == rank:
                segments.append(Segment(descriptor, shape.nbytes))
            else:
                held[peer] = hold(place.pid)
                segments.append(place.map(shape.nbytes))
        except OSError as error:
            release(places[each].pid for each in held)
            return None, f"memory of rank {peer} of the group: {error}"[:_TEXT]
    return Team(rank, segments, shape, [place.pid for place in places], held, limit), ""


def _say(problem: str, speaks: bool) -> None:
    """Log once why the backend communicates."""
    if speaks and problem not in _said:
        _log.warning("collectives of ranks on one host go through gloo, not through shared memory: %s", problem)
    _said.add(problem)
