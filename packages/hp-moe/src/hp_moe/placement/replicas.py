"""Replicas in use: weights that homes lend to slots of other ranks, and which tokens go to which of the two.

Note [Lent weights]
    A slot holds no parameter. In each forward a home sends the weights of its replicated experts to the ranks that
    compute them too; backward sends the gradients home, where they are added in the order of ranks. Optimizer states
    stay at home, so a checkpoint knows nothing of replicas. A slot costs the memory of one expert's weights from a
    layer's forward to its backward, and of their gradients in backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_moe.placement.placement import ExpertPlacement, Shares
from hp_moe.port import port
from hp_platform.frames import current_frame

Tensor = Any


@dataclass(frozen=True)
class Loans:
    """The weights that one rank lends and borrows: Note [Lent weights].

    A rank without replicas borrows one expert of its own, for which it gets no tokens: so it takes part in backward.

    Attributes:
        lent: places, among this rank's own experts, of those that go to each rank, one rank after the other.
        sent: how many go to each rank.
        received: how many come from each rank.
        borrowed: the experts that come, by rank; None for one that gets no tokens.
    """

    lent: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    borrowed: tuple[int | None, ...]

    @classmethod
    def of(cls, placement: ExpertPlacement, rank: int) -> Loans | None:
        """Plan the loans of a rank; None if no expert has a replica."""
        if not any(placement.replicas):
            return None
        ranks = range(placement.ranks)
        guests = [local[placement.home.count(r) :] for r, local in enumerate(placement.local)]
        own = placement.local[rank]
        to_each = [[own.index(e) for e in guests[r] if placement.home[e] == rank] for r in ranks]
        from_each: list[list[int | None]] = [[e for e in guests[rank] if placement.home[e] == r] for r in ranks]
        if not guests[rank]:
            to_each[rank], from_each[rank] = [0], [None]
        return cls(
            tuple(itertools.chain.from_iterable(to_each)),
            tuple(map(len, to_each)),
            tuple(map(len, from_each)),
            tuple(itertools.chain.from_iterable(from_each)),
        )

    def borrow(self, parameter: Tensor, group: Any) -> Tensor:
        """Exchange the entries of a parameter ``[own experts, ...]``; return those that came."""
        f = port()
        flat = f.take(parameter.reshape(parameter.shape[0], -1), f.message([self.lent], parameter))
        return f.exchange(flat, self.sent, self.received, group).reshape(-1, *parameter.shape[1:])

    def sizes(self, guests: Sequence[int]) -> list[int]:
        """Return the rows of each borrowed expert, from those of the guests that get tokens."""
        rows = iter(guests)
        return [0 if expert is None else next(rows) for expert in self.borrowed]


def borrow(
    name: str, loans: Loans | None, parts: Mapping[str, Tensor], group: Any, *, deterministic: bool
) -> dict[str, Tensor]:
    """Exchange the weights of replicated experts.

    Args:
        name: of the module.
        loans: of this rank, if experts have replicas.
        parts: of its parameters, by name.
        group: of the ranks that experts are spread over.
        deterministic: the gradients of pieces go home by themselves.

    Raises:
        NotImplementedError: the layer runs in a frame that puts its weights' gradients off.
    """
    frame = current_frame()
    if (loans or deterministic) and frame is not None and frame.weights is not None:
        raise NotImplementedError(
            f"{name}: experts have replicas or are deterministic, and the layer runs in a frame that puts its weights'"
            " gradients off, as split backward does, so ranks would return gradients at different times. Use a schedule"
            " without split backward, or no replicas and deterministic=False"
        )
    if loans is None:
        return {}
    return {key: loans.borrow(part.detach() if deterministic else part, group) for key, part in parts.items()}


def choose_holders(
    experts: Tensor, placement: ExpertPlacement, group: Any, rank: int, *, whole: bool
) -> tuple[Tensor, Shares]:
    """Decide which holder of its expert computes each choice; all ranks decide from the counts of all.

    Args:
        experts: of each token and choice, flat.
        placement: of the experts.
        group: of the ranks that experts are spread over.
        rank: this one.
        whole: see ``ExpertPlacement.shares``.

    Returns:
        For each choice the place among all experts that ranks compute, one rank after the other; the shares of all.
    """
    f, count, ranks = port(), len(placement.home), placement.ranks
    message = f.message([f.count(experts, count)] * ranks, experts)
    _, received = f.exchange_numbers(message, [count] * ranks, [count] * ranks, group)()
    counts = [received[source * count : (source + 1) * count] for source in range(ranks)]
    shares = placement.shares(counts, whole=whole)
    order, inverse = f.order(experts)  # an expert's tokens as they come: the first go to its home
    holders = f.repeated_numbers(list(itertools.chain.from_iterable(shares[rank])), experts)
    return f.take(f.slots(holders, placement.holder_places)[0], inverse), shares


def check_slots(name: str, placement: ExpertPlacement, experts: int, ranks: int, slots: int) -> None:
    """Refuse a placement that a layer has no room for.

    Raises:
        ValueError: another number of experts or ranks, or more replicas on a rank than it has slots.
    """
    if len(placement.home) != experts:
        raise ValueError(f"{name}: the placement is of {len(placement.home)} experts, the layer has {experts}.")
    if placement.ranks != ranks:
        raise ValueError(f"{name}: the placement is over {placement.ranks} ranks, the experts are over {ranks}.")
    for rank, local in enumerate(placement.local):
        guests = local[placement.home.count(rank) :]
        if len(guests) > slots:
            raise ValueError(
                f"{name}: rank {rank} would hold {len(guests)} replicas, of the experts {guests}, but has {slots}"
                f" {'slot' if slots == 1 else 'slots'}: plan with plan_replicas(load, placement, slots={slots}), or"
                " apply the style with more slots"
            )
