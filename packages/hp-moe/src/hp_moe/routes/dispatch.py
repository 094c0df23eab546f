"""Orders of the rows of an exchange, and those that are computed by themselves: integers, no framework.

Note [The order of rows]
    A rank sends a row for each token and chosen expert, ordered by (destination, expert there, token, choice). What
    arrives is ordered by (source, expert, token); the experts compute it in the order (expert, source, token), so that
    the sum over an expert's rows, its weight's gradient, is a sum over sources in their order. Results go back the way
    their rows came.

Note [What ranks tell each other]
    Before the rows, each rank tells each other the rows for each of its experts, the copies of tokens, what its inputs
    are, and how many of them are wrong: Note [What is wrong on one rank] in `hp_moe.layer.inputs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hp_moe.placement.placement import ExpertPlacement, Shares

Combine = Literal["fast", "exact"]
DISPATCHERS: tuple[str, ...] = ("all_to_all", "all_gather", "deredundency")

HEADER: tuple[str, ...] = ("copies", "kind", "wrong")
"""What follows the rows for each expert in a rank's message to another."""


@dataclass(frozen=True)
class Dispatch:
    """One exchange, as one rank sees it: Note [The order of rows].

    Attributes:
        sent: rows to each rank.
        received: rows from each rank.
        sizes: rows of each expert that this rank computes, over all sources.
        blocks: (first row, rows) of what has arrived, in the order in which it is computed.
        copies_sent: tokens that go to each rank once, whatever the number of their experts there.
        copies_received: the same from each rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    copies_sent: tuple[int, ...]
    copies_received: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        copies_sent: Sequence[int] = (),
        copies_received: Sequence[int] = (),
    ) -> Dispatch:
        """Plan an exchange.

        Args:
            sent: for each rank the rows for each of its experts.
            received: from each rank the rows for each of this rank's experts.
            copies_sent: see ``Dispatch``.
            copies_received: see ``Dispatch``.
        """
        width = len(received[0])
        ends = list(itertools.accumulate(itertools.chain.from_iterable(received), initial=0))
        return cls(
            tuple(map(sum, sent)),
            tuple(map(sum, received)),
            tuple(map(sum, zip(*received, strict=True))),
            tuple(
                (ends[source * width + expert], received[source][expert])
                for expert in range(width)
                for source in range(len(received))
            ),
            tuple(copies_sent),
            tuple(copies_received),
        )

    @property
    def sorted(self) -> bool:
        """Tell whether what arrives is in the order in which it is computed."""
        filled = [first for first, rows in self.blocks if rows]
        return filled == sorted(filled)


class Message:
    """What one rank told another: Note [What ranks tell each other].

    Attributes:
        rows: for each of the receiver's experts.
        told: by the names of ``HEADER``.
        further: numbers that a route adds.
    """

    def __init__(self, numbers: Sequence[int], width: int) -> None:
        end = width + len(HEADER)
        self.rows, self.further = numbers[:width], numbers[end:]
        self.told = dict(zip(HEADER, numbers[width:end], strict=True))


def fit(received: Sequence[Message]) -> bool:
    """Tell whether all ranks' inputs are right and of one kind, the same on all: Note [What ranks tell each other]."""
    told = [message.told for message in received]
    return not any(each["wrong"] for each in told) and len({each["kind"] for each in told}) == 1


@dataclass(frozen=True)
class Sources:
    """The pieces of one call on one rank: the rows of one source for one expert, where there are any.

    Attributes:
        ranks: of the group; each is a source.
        experts: at home here, ascending.
        pieces: (place among the experts that are computed here, expert, source), as rows are ordered.
        sizes: rows of each piece.
        own: which of the pieces are of experts at home here.
        sent: which are of others, by their home.
        sent_sizes: pieces whose gradients go to each rank.
        received: (expert, source) of the gradients that come, as they come.
        received_sizes: how many come from each rank.
    """

    ranks: int
    experts: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]
    own: tuple[int, ...]
    sent: tuple[int, ...]
    sent_sizes: tuple[int, ...]
    received: tuple[tuple[int, int], ...]
    received_sizes: tuple[int, ...]

    @classmethod
    def of(cls, placement: ExpertPlacement, rank: int, rows: Sequence[int], shares: Shares | None) -> Sources:
        """List the pieces of a rank.

        Args:
            placement: of the experts.
            rank: this one.
            rows: of each expert that is computed here and each source, ordered by expert.
            shares: of all sources, each of whose tokens for an expert go to one holder; None without replicas.
        """
        ranks, local = range(placement.ranks), placement.local[rank]
        experts = local[: placement.home.count(rank)]
        numbered = [(slot, expert, source) for slot, expert in enumerate(local) for source in ranks]
        filled = [(piece, count) for piece, count in zip(numbered, rows, strict=True) if count]
        pieces = tuple(piece for piece, _ in filled)
        homes = [placement.home[expert] for _, expert, _ in pieces]
        from_each = [list(_computed(placement, rank, other, shares)) for other in ranks]
        return cls(
            placement.ranks,
            experts,
            pieces,
            tuple(count for _, count in filled),
            tuple(at for at, home in enumerate(homes) if home == rank),
            tuple(at for at, home in enumerate(homes) if home != rank),  # replicas are ordered by home
            tuple(homes.count(other) if other != rank else 0 for other in ranks),
            tuple(key for keys in from_each for key in keys),
            tuple(map(len, from_each)),
        )


def _computed(placement: ExpertPlacement, home: int, other: int, shares: Shares | None) -> Iterator[tuple[int, int]]:
    """List (expert, source) of the pieces of one rank's experts that another rank computes, in that one's order."""
    if shares is None or other == home:
        return
    for expert, holders in enumerate(placement.holders):
        if holders[0] == home and other in holders:
            for source, row in enumerate(shares):
                if row[expert][holders.index(other)]:
                    yield expert, source
