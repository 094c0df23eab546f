"""The two ways of tokens to their experts and back.

Note [Rows or copies]
    ``exact`` sends a row for each choice and sums a token's results where it came from, in the order of its choices:
    the bits do not depend on where experts are. ``fast`` sends a token once to each rank that has any of its experts,
    which adds their results up there: fewer bytes by as much as a token's experts share ranks. Its weights travel too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from hp_moe.dispatch import Dispatch
from hp_moe.port import port

__all__ = ["Exact", "Fast", "Route"]

Tensor = Any


class Route(Protocol):
    """A way of the tokens of one call.

    Attributes:
        plan: of the exchange; set before ``dispatch``.
        scale: ``[rows, 1]``, what experts multiply their results by, set by ``dispatch``; None for nothing.
    """

    plan: Dispatch
    scale: Tensor | None

    def copies(self) -> Sequence[Tensor | tuple[int, ...]]:
        """Count the tokens that go to each rank once."""
        ...

    def dispatch(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Send tokens ``[tokens, hidden]`` to their experts; return the rows of this rank's, ordered by expert."""
        ...

    def combine(self, rows: Tensor) -> Tensor:
        """Send results back and sum those of each token: ``[tokens, hidden]``."""
        ...


class Exact:
    """A row for each choice: Note [Rows or copies].

    Args:
        slots: for each token and choice, the number of its expert among all that ranks compute.
        choices: a token.
        widths: how many experts each rank computes.
        group: of the ranks.
    """

    plan: Dispatch
    scale = None

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        self.choices, self.group, self.ranks = choices, group, len(widths)
        self.order, self.inverse = port().order(slots)

    def copies(self) -> Sequence[Tensor | tuple[int, ...]]:
        return [(0,)] * self.ranks

    def dispatch(self, tokens: Tensor, weights: Tensor) -> Tensor:
        f, plan = port(), self.plan
        self.weights = weights
        rows = f.exchange(
            f.spread(tokens, self.order, self.inverse, self.choices), plan.sent, plan.received, self.group
        )
        if plan.sorted:
            return rows
        self.back, self.there = f.order(f.positions(plan.blocks, self.order))
        return f.spread(rows, self.there, self.back, 1)

    def combine(self, rows: Tensor) -> Tensor:
        f, plan = port(), self.plan
        if not plan.sorted:
            rows = f.spread(rows, self.back, self.there, 1)
        rows = f.exchange(rows, plan.received, plan.sent, self.group)
        return f.combined(rows, self.weights, self.order, self.inverse)


class Fast:
    """A copy for each rank: Note [Rows or copies].

    Args:
        slots, choices, widths, group: see ``Exact``.
    """

    plan: Dispatch

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        f = port()
        self.group = group
        self.order, self.inverse = f.order(slots)
        self.token, place, self.counts = f.copies(slots, choices, widths)
        self.place = f.take(place, self.order)

    def copies(self) -> Sequence[Tensor | tuple[int, ...]]:
        return port().split(self.counts, [1] * len(self.counts))

    def dispatch(self, tokens: Tensor, weights: Tensor) -> Tensor:
        f, plan = port(), self.plan
        self.tokens = len(tokens)
        copies = f.exchange(f.take(tokens, self.token), plan.copies_sent, plan.copies_received, self.group)
        own = f.spread(weights.reshape(-1, 1), self.order, self.inverse, 1)
        own = f.exchange(own, plan.sent, plan.received, self.group)
        # A copy's place among those of its source, and before it those of the sources before.
        before = itertools.accumulate(plan.copies_received, initial=0)
        shift = f.repeated(f.message([tuple(before)[:-1]], self.order).reshape(-1, 1), plan.received).reshape(-1)
        places = f.exchange(self.place, plan.sent, plan.received, self.group) + shift
        if not plan.sorted:
            back, there = f.order(f.positions(plan.blocks, self.order))
            places, own = f.take(places, there), f.spread(own, there, back, 1)
        self.places, self.scale, self.count = places, own, len(copies)
        return f.take(copies, places)

    def combine(self, rows: Tensor) -> Tensor:
        f, plan = port(), self.plan
        sums = f.summed(rows, self.places, self.count)
        sums = f.exchange(sums, plan.copies_received, plan.copies_sent, self.group)
        return f.summed(sums, self.token, self.tokens)
