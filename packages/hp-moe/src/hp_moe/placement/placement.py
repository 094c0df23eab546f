"""Where experts are: their homes, their replicas, and which tokens go to which of them.

Note [How replicas balance]
    A rank that is the home of a hot expert gets more tokens than others. Moving experts does not help where one expert
    alone exceeds a rank's share; a replica on a rank with little to do does, and takes as many tokens as even both out.
    Replicas keep every home where it is, so that only the replicas' weights travel.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hp_dtensor import Placement, RaggedShard, Shard

Shares = tuple[tuple[tuple[int, ...], ...], ...]
"""For each source rank and expert, the tokens that go to each holder of the expert, in the order of ``holders``."""

_SWEEPS = 12


@dataclass(frozen=True)
class ExpertPlacement:
    """Which rank holds which expert.

    Attributes:
        home: for each expert the rank that has its parameters and its optimizer states.
        replicas: for each expert further ranks that compute it too, ascending; none for most.
        ranks: of the group that the experts are spread over.

    Raises:
        ValueError: a rank outside of the group, or a rank that holds an expert twice.
    """

    home: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    ranks: int

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.home):
            raise ValueError(f"ExpertPlacement: {len(self.home)} homes, but replicas of {len(self.replicas)} experts.")
        for expert, holders in enumerate(self.holders):
            if any(not 0 <= rank < self.ranks for rank in holders) or len(set(holders)) != len(holders):
                raise ValueError(
                    f"ExpertPlacement: expert {expert} is held by the ranks {holders}; each must be one of {self.ranks}"
                    " from 0, and none twice."
                )

    @classmethod
    def even(cls, experts: int, ranks: int) -> ExpertPlacement:
        """Give each rank as many neighbouring experts as others; the first ranks one more where that does not divide.

        Raises:
            ValueError: fewer experts than ranks.
        """
        if not 1 <= ranks <= experts:
            raise ValueError(
                f"{experts} experts cannot be spread over {ranks} ranks: each rank needs one; use at most {experts}."
            )
        few, more = divmod(experts, ranks)
        home = tuple(rank for rank in range(ranks) for _ in range(few + (rank < more)))
        return cls(home, ((),) * experts, ranks)

    def cut(self) -> Placement:
        """Return the layout of experts' parameters on the axis: each rank has the rows of its own, ascending."""
        at_home = Counter(self.home)
        sizes = tuple(at_home[rank] for rank in range(self.ranks))
        if list(self.home) != sorted(self.home):
            return RaggedShard((0,), sizes, owners=self.home)
        return Shard(0) if len(set(sizes)) == 1 else RaggedShard((0,), sizes)

    @functools.cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """List the ranks that compute each expert, its home first."""
        return tuple((home, *others) for home, others in zip(self.home, self.replicas, strict=True))

    @functools.cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """List the experts that each rank computes: those at home there, ascending, then its replicas, by home."""
        at_home: list[list[int]] = [[] for _ in range(self.ranks)]
        visiting: list[list[int]] = [[] for _ in range(self.ranks)]
        for expert in sorted(range(len(self.home)), key=lambda each: self.home[each]):
            at_home[self.home[expert]].append(expert)
            for rank in self.replicas[expert]:
                visiting[rank].append(expert)
        return tuple((*own, *guests) for own, guests in zip(at_home, visiting, strict=True))

    @functools.cached_property
    def holder_places(self) -> tuple[int, ...]:
        """List each expert's holders, one expert after the other, as places among all experts that ranks compute."""
        pairs = [(expert, rank) for rank, local in enumerate(self.local) for expert in local]
        places = {pair: place for place, pair in enumerate(pairs)}
        return tuple(places[expert, rank] for expert, holders in enumerate(self.holders) for rank in holders)

    def shares(self, counts: Sequence[Sequence[int]], *, whole: bool = False) -> Shares:
        """Decide how many tokens of each source go to which holder of an expert, so that ranks have alike to do.

        The same on every rank that has the same counts: there are only integers in it.

        Args:
            counts: for each source rank, its tokens for each expert.
            whole: send all of a source's tokens for an expert to one holder; the gradient of an expert's weight is then
                a sum over sources in a fixed order, of the same bits wherever it was computed.

        Returns:
            For each source and expert one number a holder.
        """
        sources = range(len(counts))
        total = [sum(counts[source][expert] for source in sources) for expert in range(len(self.home))]
        load = [0] * self.ranks
        for expert, holders in enumerate(self.holders):
            if len(holders) == 1:
                load[holders[0]] += total[expert]
        parts: list[list[tuple[int, ...]]] = [[(row[expert],) for expert in range(len(total))] for row in counts]
        spread = [expert for expert, holders in enumerate(self.holders) if len(holders) > 1]
        spread.sort(key=lambda expert: (-total[expert], expert))
        if whole:
            for expert in spread:
                holders = self.holders[expert]
                for source in sorted(sources, key=lambda each: (-counts[each][expert], each)):
                    place = min(range(len(holders)), key=lambda each: (load[holders[each]], each))
                    tokens = counts[source][expert]
                    load[holders[place]] += tokens
                    parts[source][expert] = tuple(tokens if each == place else 0 for each in range(len(holders)))
            return tuple(map(tuple, parts))
        for expert, quota in self._quotas(spread, total, load).items():
            left = list(quota)
            for source in sources:
                tokens, taken = counts[source][expert], []
                for place, room in enumerate(left):
                    taken.append(min(tokens, room))
                    tokens -= taken[-1]
                    left[place] -= taken[-1]
                parts[source][expert] = tuple(taken)
        return tuple(map(tuple, parts))

    def _quotas(self, spread: Sequence[int], total: Sequence[int], load: list[int]) -> dict[int, list[int]]:
        """Pour each replicated expert's tokens onto its holders, again and again until no pouring changes much."""
        quotas = {expert: [0] * len(self.holders[expert]) for expert in spread}
        for _ in range(_SWEEPS):
            moved = 0
            for expert in spread:
                holders, before = self.holders[expert], quotas[expert]
                others = [load[rank] - tokens for rank, tokens in zip(holders, before, strict=True)]
                quotas[expert] = _levelled(others, total[expert])
                for rank, other, tokens, old in zip(holders, others, quotas[expert], before, strict=True):
                    load[rank] = other + tokens
                    moved += abs(tokens - old)
            if moved * 1000 <= sum(load):
                break
        return quotas

    def loads(self, shares: Shares) -> tuple[int, ...]:
        """Count the tokens that each rank computes."""
        load = [0] * self.ranks
        for row in shares:
            for holders, parts in zip(self.holders, row, strict=True):
                for rank, tokens in zip(holders, parts, strict=True):
                    load[rank] += tokens
        return tuple(load)


def _levelled(loads: Sequence[int], tokens: int) -> list[int]:
    """Pour tokens onto loads so that the highest of them stays as low as possible; return what each gets."""
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    added, filled = [0] * len(loads), 0
    for count, place in enumerate(order, start=1):  # `order[:count]` are level at loads[place]
        filled += loads[place]
        following = loads[order[count]] if count < len(order) else None
        if following is None or following * count - filled >= tokens:
            level, extra = divmod(filled + tokens, count)
            for index, each in enumerate(order[:count]):
                added[each] = level + (index < extra) - loads[each]
            break
    return added


def plan_replicas(
    load: Sequence[int], placement: ExpertPlacement, slots: int = 1, *, keep: float = 0.05
) -> ExpertPlacement:
    """Choose the replicas that even out a load.

    The most loaded rank gives a part of its hottest expert to the least loaded rank with a free slot, as much as brings
    one of both to the mean; again, until slots or excess are used up. Homes stay.

    Args:
        load: tokens for each expert, of steps past.
        placement: the homes, and the replicas so far.
        slots: replicas that a rank has room for.
        keep: leave the replicas as they are unless the worst rank's load would fall by more than this share of the
            mean, so that weights do not travel for nothing.

    Returns:
        The placement with new replicas, or the same.
    """
    if len(load) != len(placement.home):
        raise ValueError(f"plan_replicas: loads of {len(load)} experts, but {len(placement.home)} are placed.")
    if slots < 0 or any(tokens < 0 for tokens in load):
        raise ValueError("plan_replicas: slots and loads must not be negative.")
    ranks, mean = placement.ranks, sum(load) / placement.ranks
    own: list[dict[int, float]] = [{} for _ in range(ranks)]
    for expert, rank in enumerate(placement.home):
        own[rank][expert] = float(load[expert])
    totals = [sum(each.values()) for each in own]
    free = [slots] * ranks
    replicas: list[list[int]] = [[] for _ in load]
    while True:
        # Only a rank's own experts are passed on: a part of a part would need a third copy.
        giver = max(range(ranks), key=lambda rank: (totals[rank], -rank))
        if totals[giver] <= mean * (1 + 1e-3):
            break
        expert = max(own[giver], key=lambda each: (own[giver][each], -each), default=None)
        takers = [
            rank
            for rank in range(ranks)
            if free[rank] and totals[rank] < mean and rank != giver and rank not in replicas[expert or 0]
        ]
        if expert is None or not takers or own[giver][expert] <= 0:
            break
        taker = min(takers, key=lambda rank: (totals[rank], rank))
        moved = min(own[giver][expert], totals[giver] - mean, mean - totals[taker])
        own[giver][expert] -= moved
        totals[giver] -= moved
        totals[taker] += moved
        free[taker] -= 1
        replicas[expert].append(taker)
    chosen = ExpertPlacement(placement.home, tuple(tuple(sorted(each)) for each in replicas), ranks)
    before, after = (max(each.loads(each.shares([load]))) for each in (placement, chosen))
    too_many = any(len(held) - placement.home.count(rank) > slots for rank, held in enumerate(placement.local))
    return chosen if too_many or before - after > keep * mean else placement
