"""The ways of tokens to their experts and back, by an all-to-all: a row for each choice, or a copy for each rank.

Note [Rows or copies]
    ``exact`` sends a row for each choice and sums a token's results where it came from, in the order of its choices:
    the bits do not depend on where experts are. ``fast`` sends a token once to each rank that has any of its experts,
    which adds their results up there: fewer bytes by as much as a token's experts share ranks. Its weights travel too.

Note [Begun and waited for]
    An exchange is begun in one place and waited for in another, forward and backward: see ``Port.transfer``. What runs
    in between, runs under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hp_moe.placement.placement import Shares
from hp_moe.port import Transfer, port
from hp_moe.routes.dispatch import Dispatch, Message

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
