"""Which ranks hold the same weights and optimizer states, and whose copy is wrong where they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_plan.checks.sdc.corruption import Verdict

WEIGHT = ""
"""The key of a column that is a weight; those of states are the optimizer's own, such as `exp_avg`."""


@dataclass(frozen=True, slots=True)
class Column:
    """A weight, or a state of one, that several ranks hold.

    Attributes:
        identity: of the part of the parameter.
        key: `WEIGHT`, or the state's.
        name: of the parameter; empty where this rank does not hold it.
    """

    identity: int
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class Unequal:
    """A column whose copies differ.

    Attributes:
        column: which.
        sums: of the bits, by the rank that holds the copy.
    """

    column: Column
    sums: Mapping[int, int]

    @property
    def wrong(self) -> tuple[int, ...]:
        """The ranks whose copy differs from that of most; all of them where no copy is that of most."""
        counted = Counter(self.sums.values()).most_common()
        value, count = counted[0]
        if 2 * count <= len(self.sums):
            return tuple(sorted(self.sums))
        return tuple(sorted(rank for rank, own in self.sums.items() if own != value))

    @property
    def decided(self) -> bool:
        """True if most copies are equal."""
        return len(self.wrong) < len(self.sums)

    @property
    def verdict(self) -> Verdict:
        """Transient, or undecided without a majority."""
        return Verdict.TRANSIENT if self.decided else Verdict.UNDECIDED


class SharedColumns:
    """The columns that a rank compares with others.

    Ranks that hold copies in common, or have them in common with a third, compare in one all-reduce.

    Example:
        >>> copies = SharedColumns([(1, 2), (1, 3), (4,)], ("", "exp_avg"), {1: "norm.weight", 2: "up.weight"}, rank=0)
        >>> copies.ranks, [(each.name, each.key) for each in copies.columns]
        ((0, 1), [('norm.weight', ''), ('norm.weight', 'exp_avg')])

    Args:
        held: the parts of parameters that each rank holds.
        keys: of the columns of a part.
        names: of those that this rank holds.
        rank: this one.

    Attributes:
        ranks: that compare together, this one among them.
        columns: what they compare, alike on all of them but for the names.
    """

    def __init__(
        self, held: Sequence[Sequence[int]], keys: Sequence[str], names: Mapping[int, str], *, rank: int
    ) -> None:
        holders: dict[int, list[int]] = {}
        for other, parts in enumerate(held):
            for part in dict.fromkeys(parts):
                holders.setdefault(part, []).append(other)
        together, grown = {rank}, True
        while grown:
            linked = {
                other for ranks in holders.values() if len(ranks) > 1 and together & set(ranks) for other in ranks
            }
            grown = not linked <= together
            together |= linked
        self.ranks = tuple(sorted(together))
        copied = sorted(part for part, ranks in holders.items() if len(ranks) > 1 and ranks[0] in together)
        self.columns = tuple(Column(part, key, names.get(part, "")) for part in copied for key in keys)
        self._keys, self._at = tuple(keys), {part: number * len(keys) for number, part in enumerate(copied)}

    def numbers(self, part: int) -> Iterator[tuple[str, int]]:
        """List the columns of a part as their keys and numbers; none of a part that no other rank holds."""
        if part in self._at:
            yield from ((key, self._at[part] + place) for place, key in enumerate(self._keys))
