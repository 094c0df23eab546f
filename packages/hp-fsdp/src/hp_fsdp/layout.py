"""FlatLayout: where each parameter of a group lies in the flat buffer, and which part of it each rank owns.

Note [Ragged pieces]
    The parameters lie one after the other in one buffer, which is cut in equal contiguous pieces, one a rank, wherever
    the cuts fall. So the gathered pieces are the buffer, and the buffer's pieces are what a reduce-scatter hands out:
    neither needs a copy in or out. A parameter's part on a rank is a contiguous run of its elements (a `RaggedShard`),
    often none. The price is that no shard is a whole row; what works on elements (optimizers, norms, checkpoints) does
    not mind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

__all__ = [
    "BLOCK",
    "FlatLayout",
]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parameters in one flat buffer that ``ranks`` ranks own in equal contiguous pieces. ``FlatLayout.of`` makes one.

    Example:
        >>> layout = FlatLayout.of([6, 3], ranks=2, align=4)
        >>> layout.offsets, layout.piece, layout.total      # 2 and 5 elements of padding
        ((0, 8), 8, 16)
        >>> layout.units(0), layout.units(1)
        ((6, 0), (0, 3))

    Attributes:
        numels: number of elements of each parameter.
        ranks: number of ranks.
        offsets: where each parameter starts in the buffer.
        piece: number of elements that each rank owns.
    """

    numels: tuple[int, ...]
    ranks: int
    offsets: tuple[int, ...]
    piece: int

    @staticmethod
    def of(numels: Sequence[int], ranks: int, *, align: int = 1) -> FlatLayout:
        """Lays the parameters out in their order.

        Args:
            numels: number of elements of each parameter.
            ranks: number of ranks.
            align: parameters and pieces start at multiples of this number of elements.

        Raises:
            ValueError: ``ranks`` or ``align`` below one.
        """
        if ranks < 1 or align < 1:
            raise ValueError(f"FlatLayout: ranks and align must be at least 1, got ranks={ranks}, align={align}")
        offsets = []
        end = 0
        for numel in numels:
            offsets.append(end)
            end += ceil(numel / align) * align
        piece = ceil(end / (ranks * align)) * align
        return FlatLayout(tuple(numels), ranks, tuple(offsets), piece)

    @property
    def total(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.piece * self.ranks

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """The elements of parameter ``index`` that ``rank`` owns: start and stop in the flattened parameter."""
        offset, numel = self.offsets[index], self.numels[index]
        start = min(max(rank * self.piece - offset, 0), numel)
        stop = min(max((rank + 1) * self.piece - offset, 0), numel)
        return start, stop

    def place(self, index: int, rank: int) -> tuple[int, int]:
        """The same elements as start and stop in the rank's piece; ``(0, 0)`` where the rank owns none."""
        start, stop = self.part(index, rank)
        if start == stop:
            return 0, 0
        shift = self.offsets[index] - rank * self.piece
        return start + shift, stop + shift

    def units(self, index: int) -> tuple[int, ...]:
        """How many elements of parameter ``index`` each rank owns."""
        return tuple(stop - start for start, stop in (self.part(index, rank) for rank in range(self.ranks)))

    def splits(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes that cut the rank's piece in runs, and for each parameter the index of its run.

        The gaps of padding are runs, too; a parameter of which the rank owns nothing has a run of no elements.

        Example:
            >>> FlatLayout.of([6, 3], ranks=2, align=4).splits(0)
            ((6, 0, 2), (0, 1))
        """
        sizes: list[int] = []
        runs: list[int] = []
        end = 0
        for index in range(len(self.numels)):
            start, stop = self.place(index, rank)
            if start > end:
                sizes.append(start - end)
            runs.append(len(sizes))
            sizes.append(stop - start)
            end = max(end, stop)
        if end < self.piece:
            sizes.append(self.piece - end)
        return tuple(sizes), tuple(runs)


BLOCK = 1024
"""In deterministic mode, parameters are cut between blocks of this many elements, and norms are sums over blocks."""
