"""Which rank computes wrongly, of what ranks have read in three computations of the same samples.

Note [Vote of three]
    Where two of three results are equal and one is not, its copy (Note [Rotation]) was wrong then: once is transient,
    more often persistent. With two copies one of them computes the samples twice: a copy that differs from itself is
    wrong, and two that differ from each other and not from themselves can't be told apart. Inside of a copy the rank
    that differs first is named: by micro-batch and stage, forwards before backwards, then by the place in its own
    step; what its neighbours read later has come from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hp_plan.checks.sdc.corruption import Verdict
from hp_plan.checks.sdc.rotation import Rotation

Order = tuple[int, int, int, int]
"""Where in a step something was read: 0 of a forward or 1 of a backward, micro-batch, stage as it comes, place."""
COMPUTATIONS = 3


@dataclass(frozen=True)
class Computed:
    """What a rank has read in one computation of a step's gradients.

    Attributes:
        names: of the readings, such as `forward model.layers.0.mlp`.
        orders: of the readings, one `Order` each.
        bits: sums of bits, int64.
        wires: what has not arrived as it was sent: the group of parameters, its sender, both sums of bits.
    """

    names: tuple[str, ...]
    orders: tuple[Order, ...]
    bits: NDArray[np.int64]
    wires: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def digest(self) -> int:
        """A number that differs where anything but the wires does."""
        own = blake2b("\n".join(self.names).encode(), digest_size=8)
        own.update(self.bits.tobytes())
        return int.from_bytes(own.digest(), "little", signed=True)

    def encode(self) -> bytes:
        """Return it as bytes for other ranks."""
        return json.dumps([self.names, self.orders, self.bits.tolist(), self.wires]).encode()

    @staticmethod
    def decode(data: bytes) -> Computed:
        """Read what another rank has encoded."""
        names, orders, bits, wires = json.loads(data)
        return Computed(tuple(names), tuple(map(tuple, orders)), np.array(bits, np.int64), tuple(map(tuple, wires)))


@dataclass(frozen=True)
class Finding:
    """What a vote has found.

    Attributes:
        ranks: the one that was wrong, or those of which one was.
        where: "compute" or "wire".
        name: of the first reading that differs.
        verdict: transient, persistent or undecided.
        bits: that of the ranks, and of another.
    """

    ranks: tuple[int, ...]
    where: Literal["compute", "wire"]
    name: str
    verdict: Verdict
    bits: tuple[int, ...]


@dataclass(frozen=True)
class _First:
    """The first reading of a copy that differs from another's."""

    order: Order
    ranks: tuple[int, ...]
    name: str
    bits: tuple[int, int]


def first_difference(
    own: Mapping[int, Computed], others: Mapping[int, Computed]
) -> tuple[tuple[int, ...], str, tuple[int, int]] | None:
    """Return the ranks whose readings differ first, the name, and both sums of bits; None where all are equal.

    Args:
        own: readings by rank.
        others: those of the same work, under the same ranks.
    """
    found: list[_First] = []
    for rank, mine in own.items():
        theirs = others[rank]
        for place in range(max(len(mine.names), len(theirs.names))):
            if place >= min(len(mine.names), len(theirs.names)):
                longer = mine if place < len(mine.names) else theirs
                found.append(_First(longer.orders[place], (rank,), longer.names[place], (0, 0)))
                break
            if mine.names[place] != theirs.names[place] or mine.bits[place] != theirs.bits[place]:
                bits = (int(mine.bits[place]), int(theirs.bits[place]))
                found.append(_First(mine.orders[place], (rank,), mine.names[place], bits))
                break
    if not found:
        return None
    first = min(found, key=lambda each: each.order)
    ranks = tuple(sorted(rank for each in found if each.order == first.order for rank in each.ranks))
    return ranks, first.name, first.bits


def vote(rotation: Rotation, everyone: Sequence[Sequence[Computed]]) -> list[Finding]:
    """Name the ranks that were wrong: Note [Vote of three].

    Args:
        rotation: of the plan.
        everyone: what each rank has read in each of three computations, by rank.
    """
    found = _wires(everyone)
    blamed = {rank for each in found for rank in each.ranks}
    copies, count = rotation.copies, len(rotation.copies)

    def content(copy: int, number: int) -> tuple[int, ...]:
        return tuple(everyone[rank][number].digest for rank in copies[copy])

    odd: dict[int, list[tuple[int, int, int]]] = {}  # copy: (computation, another copy, its computation)
    apart: list[tuple[int, int]] = []  # two copies that differ from each other alone
    split: list[list[tuple[int, int]]] = []
    for samples in range(count):
        done = [(number, (samples - number) % count) for number in range(COMPUTATIONS)]
        contents = [content(copy, number) for number, copy in done]
        if len(set(contents)) == 1:
            continue
        if len(set(contents)) == COMPUTATIONS:
            (number, copy), _, (last, same) = done
            if copy == same:  # that differs from itself, and from another
                odd.setdefault(copy, []).extend([(number, copy, last), (last, copy, number)])
            else:
                split.append([(copy, number) for number, copy in done])
            continue
        place = next(place for place in range(COMPUTATIONS) if contents.count(contents[place]) == 1)
        (number, copy), (other, reference) = done[place], done[(place + 1) % COMPUTATIONS]
        if count == 2 and place == 1:
            apart.append((copy, reference))
        odd.setdefault(copy, []).append((number, reference, other))
    lasting = len(apart) == 2  # both copies' samples: one of them is wrong each time, and as wrong as before
    for copy, times in sorted(odd.items()):
        if blamed & set(copies[copy]):
            continue
        ranks, name, bits = _first(everyone, copies, copy, times[0])
        verdict = Verdict.TRANSIENT if len({number for number, *_ in times}) == 1 else Verdict.PERSISTENT
        if lasting and copy in apart[0]:
            others, *_ = _first(everyone, copies, copy, times[0], of_reference=True)
            found.append(Finding(tuple(sorted({*ranks, *others})), "compute", name, Verdict.PERSISTENT, bits))
            blamed |= {rank for each in apart[0] for rank in copies[each]}
            continue
        found.append(Finding(ranks, "compute", name, verdict, bits))
        blamed |= set(copies[copy])
    for three in split:
        if any(blamed & set(copies[copy]) for copy, _ in three):
            continue
        found.append(_split(everyone, copies, three))
        blamed |= {rank for copy, _ in three for rank in copies[copy]}
    return found


def _first(
    everyone: Sequence[Sequence[Computed]],
    copies: Sequence[Sequence[int]],
    copy: int,
    at: tuple[int, int, int],
    *,
    of_reference: bool = False,
) -> tuple[tuple[int, ...], str, tuple[int, int]]:
    """Return the ranks of a copy that differ first from another's, or those others, the name, and the bits."""
    number, reference, other = at
    own = {rank: everyone[rank][number] for rank in copies[copy]}
    there = dict(zip(copies[copy], copies[reference], strict=True))
    first = first_difference(own, {rank: everyone[there[rank]][other] for rank in own})
    assert first is not None
    ranks, name, bits = first
    return (tuple(there[rank] for rank in ranks) if of_reference else ranks), name, bits


def _split(
    everyone: Sequence[Sequence[Computed]], copies: Sequence[Sequence[int]], three: Sequence[tuple[int, int]]
) -> Finding:
    """Tell of three results of which no two are equal: nobody knows which is right."""
    (first, number), (second, other), _ = three
    ranks, name, bits = _first(everyone, copies, first, (number, second, other))
    members = {*ranks, *(rank for copy, _ in three[1:] for rank in copies[copy])}
    return Finding(tuple(sorted(members)), "compute", name, Verdict.UNDECIDED, bits)


def _wires(everyone: Sequence[Sequence[Computed]]) -> list[Finding]:
    """List the ranks at which something else has arrived than was sent."""
    found = []
    for rank, own in enumerate(everyone):
        times = [each.wires for each in own if each.wires]
        if times:
            name, sender, sent, arrived = times[0][0]
            verdict = Verdict.TRANSIENT if len(times) == 1 else Verdict.PERSISTENT
            found.append(Finding((rank,), "wire", f"{name} from rank {sender}", verdict, (arrived, sent)))
    return found
