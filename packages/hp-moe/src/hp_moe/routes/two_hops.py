"""Tokens over two axes of ranks: once over the slow links to each group of ranks, and spread inside of it.

Note [Two hops]
    Rank (o, i) of the axes sends a token once to rank (p, i) of each group p that has any of its experts. That rank
    sends it once to each rank of its group that has any, which adds their results up; it adds those up in its turn and
    returns one sum. All ranks tell each other what they need to plan both hops in one exchange of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hp_dtensor import DeviceMesh
from hp_moe.port import port
from hp_moe.routes.dispatch import Dispatch, Message
from hp_moe.routes.routes import Hop, Route, at_once
from hp_platform import get_platform

Tensor = Any


class Axes(NamedTuple):
    """The two axes that ranks are spread over, the slow one first.

    Attributes:
        groups: of the ranks on each, this one among them.
        sizes: of both.
        place: of this rank on both.
    """

    groups: tuple[Any, Any]
    sizes: tuple[int, int]
    place: tuple[int, int]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Axes:
        """Return the axes of a mesh of two."""
        groups = mesh.get_group(0), mesh.get_group(1)
        rank = get_platform().groups.rank
        return cls(groups, (mesh.size(0), mesh.size(1)), (rank(groups[0]), rank(groups[1])))


class TwoHops(Route):
    """Copies of tokens over two axes: Note [Two hops].

    Args:
        slots, choices, widths, group: see ``Route``.
        axes: of the group's ranks.
    """

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any, axes: Axes) -> None:
        super().__init__(slots, choices, widths, group)
        f, tokens, inside = port(), len(slots) // choices, axes.sizes[1]
        self.axes = axes
        self.groups = [slice(first, first + inside) for first in range(0, len(widths), inside)]
        self.peers = [each.start + axes.place[1] for each in self.groups]  # at this rank's place of each group
        token = f.counted(tokens, choices, slots)
        self.wide = [sum(widths[each]) for each in self.groups]
        self.outer = Hop(slots, token, tokens, self.wide, axes.groups[0])
        self.counts = f.copies(slots, token, tokens, widths)[2]

    def copies(self) -> Sequence[Tensor]:
        return port().split(self.counts, [1] * len(self.widths))

    def further(self, counts: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """Tell the next rank of each group the rows for all of the group, and the copies to it and inside of it."""
        each, told = self.copies(), {}
        outer = port().split(self.outer.counts, [1] * len(self.groups))
        for peer, group, copies in zip(self.peers, self.groups, outer, strict=True):
            told[peer] = (*counts[group], copies, *each[group])
        return [told.get(rank, ()) for rank in range(len(self.widths))]

    def further_sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        more = 1 + self.axes.sizes[1]
        to_each, of_each = [0] * len(self.widths), [0] * len(self.widths)
        for peer, wide in zip(self.peers, self.wide, strict=True):
            to_each[peer], of_each[peer] = wide + more, self.wide[self.axes.place[0]] + more
        return to_each, of_each

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        own = self.axes.place[0]
        told = [sent[peer].further for peer in self.peers]
        came = [received[peer].further for peer in self.peers]
        wide = self.wide[own]
        self.outer.exchange = Dispatch.of(
            [each[:width] for each, width in zip(told, self.wide, strict=True)],
            [each[:wide] for each in came],
            [each[width] for each, width in zip(told, self.wide, strict=True)],
            [each[wide] for each in came],
        )
        rows, copies = _sums(each[:wide] for each in came), _sums(each[wide + 1 :] for each in came)
        ends = [sum(self.widths[self.groups[own]][:place]) for place in range(self.axes.sizes[1] + 1)]
        from_each = [[received[each.start + place] for each in self.groups] for place in range(self.axes.sizes[1])]
        self.exchange = Dispatch.of(
            [rows[first:end] for first, end in zip(ends, ends[1:], strict=False)],
            [_sums(each.rows for each in messages) for messages in from_each],
            copies,
            [sum(each.told["copies"] for each in messages) for messages in from_each],
        )
        self.sizes = self.exchange.sizes

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        self.outer.begin(self.launch[0], tokens, weights.reshape(-1, 1), self.ahead)

    def end_dispatch(self) -> Tensor:
        f, own = port(), self.axes.place[0]
        copies, token, weights = self.outer.end()
        slots = f.repeated_table(tuple(range(self.wide[own])), self.outer.exchange.sizes, token)
        self.inner = Hop(slots, token, len(copies), self.widths[self.groups[own]], self.axes.groups[1])
        self.inner.exchange = self.exchange
        self.inner.begin(at_once, copies, weights)
        copies, self.places, self.scale = self.inner.end()
        return f.take(copies, self.places)

    def begin_combine(self, rows: Tensor) -> None:
        self.inner.begin_back(at_once, port().summed(rows, self.places, self.inner.count))
        self.outer.begin_back(self.launch[1], self.inner.end_back())

    def end_combine(self) -> Tensor:
        return self.outer.end_back()


def _sums(lists: Any) -> list[int]:
    return [sum(each) for each in zip(*lists, strict=True)]
