"""Routes of tokens to their experts and back: a row for each choice, copies for each rank, two hops, or all to all.

Note [Rows or copies]
    ``exact`` sends a row for each choice and sums a token's results where it came from, in the order of its choices:
    the bits do not depend on where experts are. ``fast`` sends a token once to each rank that has any of its experts,
    which adds their results up there: fewer bytes by as much as a token's experts share ranks. Its weights travel too.

Note [Begun and waited for]
    An exchange is begun in one place and waited for in another, forward and backward: see ``Port.transfer``. What runs
    in between, runs under it.

Note [Two hops]
    Rank (o, i) of the axes sends a token once to rank (p, i) of each group p that has any of its experts. That rank
    sends it once to each rank of its group that has any, which adds their results up; it adds those up in its turn and
    returns one sum. All ranks tell each other what they need to plan both hops in one exchange of numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hp_dtensor import DeviceMesh
from hp_moe.placement.placement import Shares
from hp_moe.port import Transfer, port
from hp_moe.routes.dispatch import Dispatch, Message
from hp_platform import get_platform

Tensor = Any
Begin = Callable[..., Any]


def at_once(begin: Begin, *tensors: Tensor) -> Any:
    """Begin an exchange."""
    return begin(*tensors)


class Route:
    """A way of the tokens of one call; to be subclassed.

    Args:
        slots: for each token and choice, the number of its expert among all that ranks compute, flat.
        choices: a token.
        widths: how many experts each rank computes.
        group: of the ranks.

    Attributes:
        sizes: rows of each expert of this rank; set by ``plan``.
        scale: ``[rows, 1]``, what experts multiply their results by, set by dispatch; None for nothing.
        shares: how many tokens of each source go to which holder of an expert; None without replicas.
        launch: what dispatch and combine call with the function that begins the exchange and its arguments.
        ahead: called where a dispatch's gradients have arrived: see ``Port.transfer``.
    """

    sizes: tuple[int, ...]
    scale: Tensor | None = None
    shares: Shares | None = None

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        self.choices, self.widths, self.group = choices, widths, group
        self.launch: tuple[Begin, Begin] = (at_once, at_once)
        self.ahead: Callable[[], None] = _nothing

    def copies(self) -> Sequence[Tensor | tuple[int, ...]]:
        """Count the tokens that go to each rank once."""
        return [(0,)] * len(self.widths)

    def further(self, counts: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        """List what else to tell each rank, from the rows for the experts of each."""
        return [()] * len(self.widths)

    def further_sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Count the further numbers to each rank and from each."""
        return [0] * len(self.widths), [0] * len(self.widths)

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        """Plan the exchanges by what ranks have told each other."""
        raise NotImplementedError

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        """Begin to send tokens ``[tokens, hidden]`` to their experts."""
        raise NotImplementedError

    def end_dispatch(self) -> Tensor:
        """Wait for tokens; return the rows of this rank's experts, ordered by expert."""
        raise NotImplementedError

    def begin_combine(self, rows: Tensor) -> None:
        """Begin to send results back."""
        raise NotImplementedError

    def end_combine(self) -> Tensor:
        """Wait for results and sum those of each token: ``[tokens, hidden]``."""
        raise NotImplementedError

    def dispatch(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Send tokens to their experts."""
        self.begin_dispatch(tokens, weights)
        return self.end_dispatch()

    def combine(self, rows: Tensor) -> Tensor:
        """Send results back and sum those of each token."""
        self.begin_combine(rows)
        return self.end_combine()


def _nothing() -> None:
    """Do nothing."""


def begun(
    launch: Begin,
    group: Any,
    sent: Sequence[Sequence[int]],
    received: Sequence[Sequence[int]],
    *tensors: Tensor,
    ahead: Callable[[], None] = _nothing,
) -> tuple[Transfer, Any]:
    """Begin to exchange tensors, each with its rows to and from each rank; return what to end and with what."""
    transfer = port().transfer(group, sent, received)
    transfer.early = launch is not at_once
    tensors = tuple(transfer.ahead(*tensors))
    ahead()
    return transfer, launch(transfer.begin, *tensors)


class Exact(Route):
    """A row for each choice: Note [Rows or copies]."""

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        super().__init__(slots, choices, widths, group)
        self.order, self.inverse = port().order(slots)

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        self.exchange = Dispatch.of([each.rows for each in sent], [each.rows for each in received])
        self.sizes = self.exchange.sizes

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        self.weights, plan = weights, self.exchange
        rows = port().spread(tokens, self.order, self.inverse, self.choices)
        self.way = begun(self.launch[0], self.group, [plan.sent], [plan.received], rows, ahead=self.ahead)

    def end_dispatch(self) -> Tensor:
        f, plan = port(), self.exchange
        (rows,) = self.way[0].end(*self.way[1])
        if plan.sorted:
            return rows
        self.back, self.there = f.order(f.positions(plan.blocks, rows))
        return f.spread(rows, self.there, self.back, 1)

    def begin_combine(self, rows: Tensor) -> None:
        plan = self.exchange
        if not plan.sorted:
            rows = port().spread(rows, self.back, self.there, 1)
        self.way = begun(self.launch[1], self.group, [plan.received], [plan.sent], rows)

    def end_combine(self) -> Tensor:
        (rows,) = self.way[0].end(*self.way[1])
        return port().combined(rows, self.weights, self.order, self.inverse)


class Hop:
    """Copies of tokens to the ranks that have any of their experts, and sums of results back.

    Args:
        slots: the number of an expert among all that ranks compute, for each choice of any token.
        token: of each choice.
        tokens: their number.
        widths: how many experts each rank computes.
        group: of the ranks.
    """

    exchange: Dispatch

    def __init__(self, slots: Tensor, token: Tensor, tokens: int, widths: Sequence[int], group: Any) -> None:
        f = port()
        self.tokens, self.group = tokens, group
        self.order, self.inverse = f.order(slots)
        self.token, place, self.counts = f.copies(slots, token, tokens, widths)
        self.place = f.take(place, self.order)

    def begin(self, launch: Begin, tokens: Tensor, weights: Tensor, ahead: Callable[[], None] = _nothing) -> None:
        """Begin to send copies of tokens, and for each choice its weight ``[choices, 1]`` and its copy's place."""
        f, plan = port(), self.exchange
        own = f.spread(weights, self.order, self.inverse, 1)
        self.way = begun(
            launch,
            self.group,
            [plan.copies_sent, plan.sent, plan.sent],
            [plan.copies_received, plan.received, plan.received],
            f.take(tokens, self.token),
            own,
            self.place,
            ahead=ahead,
        )

    def end(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the copies and, for each row ordered by expert, the place of its copy and its weight."""
        f, plan = port(), self.exchange
        copies, own, places = self.way[0].end(*self.way[1])
        # A copy's place among those of its source, and before it those of the sources before.
        before = tuple(itertools.accumulate(plan.copies_received, initial=0))[:-1]
        places = places + f.repeated_table(before, plan.received, places)
        if not plan.sorted:
            back, there = f.order(f.positions(plan.blocks, places))
            places, own = f.take(places, there), f.spread(own, there, back, 1)
        self.count = len(copies)
        return copies, places, own

    def begin_back(self, launch: Begin, sums: Tensor) -> None:
        """Begin to send each copy's sum back."""
        plan = self.exchange
        self.way = begun(launch, self.group, [plan.copies_received], [plan.copies_sent], sums)

    def end_back(self) -> Tensor:
        """Sum those of each token."""
        (sums,) = self.way[0].end(*self.way[1])
        return port().summed(sums, self.token, self.tokens)


class Fast(Route):
    """A copy for each rank: Note [Rows or copies]."""

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        super().__init__(slots, choices, widths, group)
        f, tokens = port(), len(slots) // choices
        self.hop = Hop(slots, f.counted(tokens, choices, slots), tokens, widths, group)

    def copies(self) -> Sequence[Tensor | tuple[int, ...]]:
        return port().split(self.hop.counts, [1] * len(self.widths))

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        copies = ([each.told["copies"] for each in way] for way in (sent, received))
        self.hop.exchange = Dispatch.of([each.rows for each in sent], [each.rows for each in received], *copies)
        self.sizes = self.hop.exchange.sizes

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        self.hop.begin(self.launch[0], tokens, weights.reshape(-1, 1), self.ahead)

    def end_dispatch(self) -> Tensor:
        copies, self.places, self.scale = self.hop.end()
        return port().take(copies, self.places)

    def begin_combine(self, rows: Tensor) -> None:
        self.hop.begin_back(self.launch[1], port().summed(rows, self.places, self.hop.count))

    def end_combine(self) -> Tensor:
        return self.hop.end_back()


class Gathered(Route):
    """An all-gather of tokens and a reduce-scatter of results.

    Of as many bytes as ranks times tokens, whatever the choices: as few as copies where most tokens go to most ranks.
    Ranks with fewer tokens than others send rows of zeros.
    """

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        super().__init__(slots, choices, widths, group)
        self.slots, self.tokens = slots.reshape(-1, choices), len(slots) // choices

    def copies(self) -> Sequence[tuple[int, ...]]:
        return [(self.tokens,)] * len(self.widths)

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        self.longest = max(each.told["copies"] for each in received)
        self.sizes = Dispatch.of([each.rows for each in sent], [each.rows for each in received]).sizes

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        f = port()
        self.copied, self.own, slots = (
            f.gathered(f.padded(each, self.longest), self.group) for each in (tokens, weights, self.slots + 1)
        )
        rank = get_platform().groups.rank(self.group)
        first = 1 + sum(self.widths[:rank])  # 0 is padding
        self.entries = f.ordered_range(slots.reshape(-1), first, self.widths[rank], sum(self.sizes))

    def end_dispatch(self) -> Tensor:
        f = port()
        self.places, self.scale = self.entries // self.choices, f.take(self.own.reshape(-1, 1), self.entries)
        return f.take(self.copied, self.places)

    def begin_combine(self, rows: Tensor) -> None:
        self.sums = port().summed(rows, self.places, self.longest * len(self.widths))

    def end_combine(self) -> Tensor:
        return port().scattered(self.sums, self.group)[: self.tokens]


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
