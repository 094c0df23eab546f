"""How messages of a channel reach the other rank: by a tag, or by a communicator of the channel's own.

Note [A communicator for each channel]
    gloo and mccl tell messages of two ranks apart by tags. nccl and hccl do not: all messages between two ranks of a
    group are in one order, in which a receive that was posted ahead would hold up every message after it, and
    collectives too. There each channel has a group of its two ranks. A communicator comes to be with its first message,
    for which both ranks wait, so the first messages are sent before any other, on all ranks in one order of all
    channels: what a schedule sends first decides nothing. Groups are kept for the next schedule of the same ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from hp_pipeline.port import port
from hp_platform import get_platform
from hp_platform.groups import when_groups_end

WINDOW = 2
"""How many messages of a channel are received ahead, where the backend can."""


class Link(NamedTuple):
    """A channel's way to the other rank.

    Attributes:
        group: holds both ranks.
        peer: the other one's rank inside the group.
        tag: of the channel's messages.
        window: how many messages are received ahead; 0 posts a receive when its message is needed.
    """

    group: Any
    peer: int
    tag: int
    window: int


_groups: dict[tuple[Any, int, int, int], Any] = {}
when_groups_end(_groups.clear)


def links(group: Any, device: Any, routes: Sequence[tuple[int, int]], *, ahead: bool = True) -> list[Link | None]:
    """Link this rank to the others, by Note [A communicator for each channel]; all ranks call it alike.

    Args:
        group: the pipeline's ranks.
        device: where this rank's messages are.
        routes: of all channels of the pipeline, the sender's and the receiver's rank inside the group.
        ahead: receive messages ahead, where the backend can.

    Returns:
        For each channel its link, None where this rank is at neither end.
    """
    platform = get_platform()
    own, members = platform.groups.rank(group), platform.groups.ranks(group)
    window = WINDOW if ahead and platform.collectives.receives_ahead(group, device) else 0
    tagged = platform.collectives.has_tags(group, device)
    numbers: Counter[tuple[int, int]] = Counter()
    result: list[Link | None] = []
    for tag, (source, target) in enumerate(routes, 1):
        key = group, source, target, numbers[source, target]
        numbers[source, target] += 1
        if own not in (source, target):
            result.append(None)
            continue
        peer = target if own == source else source
        if tagged:
            result.append(Link(group, peer, tag, window))
            continue
        place = int(members[peer] > members[own])  # inside of a group ranks follow their global order
        if key not in _groups:
            pair = platform.groups.second_group([members[source], members[target]])
            _greet(pair, place, device, own == source)
            _groups[key] = pair
        result.append(Link(_groups[key], place, 0, window))
    return result


def _greet(pair: Any, peer: int, device: Any, sends: bool) -> None:
    """Send a first message, with which the communicator comes to be."""
    collectives, number = get_platform().collectives, port().numbers((0,), device)
    (collectives.send if sends else collectives.recv)(number, peer, group=pair)
