"""Which ranks share a host, by what they say of themselves; the number of ranks a launcher started says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hp_platform.port import port

Hosts = tuple[tuple[int, ...], ...]
Level = Literal["host", "between", "mixed"]


def hosts_of(networks: Sequence[str]) -> Hosts:
    """Bring the ranks together that name the same network stack.

    Example:
        >>> hosts_of(["a", "b", "a", "b"])
        ((0, 2), (1, 3))

    Args:
        networks: what each rank names, in the order of the ranks: `hp_platform.extend.own_network`.

    Returns:
        The ranks of each host, ascending; the hosts in the order of their first ranks.
    """
    found: dict[str, list[int]] = {}
    for rank, network in enumerate(networks):
        found.setdefault(network, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def level(ranks: Sequence[int], hosts: Hosts) -> Level:
    """Tell whether ranks are all on one host, each on another one, or something between.

    Example:
        >>> hosts = ((0, 1), (2, 3))
        >>> level((0, 1), hosts), level((1, 3), hosts), level((0, 1, 2, 3), hosts)
        ('host', 'between', 'mixed')

    Args:
        ranks: at least one, as of an axis of a mesh.
        hosts: all ranks, by host.

    Returns:
        "host" also for a single rank.

    Raises:
        ValueError: a rank is on none of the hosts.
    """
    where = {rank: host for host, members in enumerate(hosts) for rank in members}
    unknown = [rank for rank in ranks if rank not in where]
    if unknown:
        raise ValueError(f"level: ranks {unknown} are on none of the hosts {hosts}.")
    used = {where[rank] for rank in ranks}
    if len(used) == 1:
        return "host"
    return "between" if len(used) == len(ranks) else "mixed"


def level_of(ranks: Sequence[int]) -> Level | None:
    """Tell the level of ranks of the world, as they named their networks when the world was made; nothing is sent.

    Args:
        ranks: global ranks, at least one.

    Returns:
        As `level`, on all ranks alike; None where ranks don't know of each other: on MindSpore, and with a store that
        keeps nothing.
    """
    if len(ranks) == 1:
        return "host"
    networks = port().groups.networks(ranks)
    return None if networks is None else level(range(len(ranks)), hosts_of(networks))
