"""Which rows are computed by themselves so that bits do not depend on where experts are: integers, no framework."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hp_moe.placement.placement import ExpertPlacement, Shares


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
