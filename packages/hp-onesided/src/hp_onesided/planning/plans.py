"""Collectives over ranks of several hosts, in parts: those inside of a host, and those between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hp_platform.extend import Hosts

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Part:
    """One collective of several that together do another one.

    Attributes:
        kind: of this one.
        level: "host": among the ranks of one host; "between": among ranks of equal place on each host.
        groups: the ranks of each group that does it, all at the same time.
        share: the larger tensor of this part, as a share of the larger tensor of the whole collective.
    """

    kind: Kind
    level: Literal["host", "between"]
    groups: tuple[tuple[int, ...], ...]
    share: Fraction


def two_level(kind: Kind, hosts: Hosts) -> tuple[Part, ...]:
    """Do a collective over several hosts so that what crosses between them is smallest.

    An all-reduce becomes a reduce-scatter on each host, an all-reduce between the ranks of equal place, and an
    all-gather on each host. Of a tensor of B bytes each rank sends the others' hosts `2 B (H - 1) / (H L)` then, for H
    hosts of L ranks. Pieces that a reduce-scatter leaves, or an all-gather takes, are in the order of the place on the
    host, then of the host: rank `hosts[h][l]` has piece `l * H + h`.

    Example:
        >>> [(part.kind, part.level, str(part.share)) for part in two_level("all_reduce", ((0, 1), (2, 3)))]
        [('reduce_scatter', 'host', '1'), ('all_reduce', 'between', '1/2'), ('all_gather', 'host', '1')]

    Args:
        kind: the collective.
        hosts: the ranks of each host, as many on each.

    Returns:
        The parts in their order. One host, or one rank a host, has one part.

    Raises:
        ValueError: the hosts have different numbers of ranks.
    """
    sizes = {len(members) for members in hosts}
    if len(sizes) != 1:
        raise ValueError(
            f"two_level: hosts of {[len(members) for members in hosts]} ranks: ranks of equal place are needed on each,"
            " so use as many ranks of every host."
        )
    local = sizes.pop()
    whole = Fraction(1)
    if len(hosts) == 1:
        return (Part(kind, "host", hosts, whole),)
    places = tuple(tuple(members[place] for members in hosts) for place in range(local))
    if local == 1:
        return (Part(kind, "between", places, whole),)
    between = Part(kind, "between", places, Fraction(1, local))
    scatter, gather = (Part(each, "host", hosts, whole) for each in ("reduce_scatter", "all_gather"))
    if kind == "all_reduce":
        return scatter, between, gather
    return (scatter, between) if kind == "reduce_scatter" else (between, gather)
