"""FlatLayout: the offset of each parameter in a group's flat buffer, and the part of it that each rank owns.

Note [Ragged pieces]
    The parameters lie one after the other in one buffer, which is split into equal contiguous pieces, one for each
    rank, at any element. So the gathered pieces are the buffer, and a reduce-scatter returns pieces of the buffer:
    neither needs a copy in or out. A parameter's shard is a contiguous range of its elements (a `RaggedShard`), often
    empty. In return shards are not made of rows, which does not matter to elementwise code (optimizers, norms,
    checkpoints).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm

LARGE = 4096
"""Elements from which on a parameter is cut where states of eight bits can be: `GroupOptions.alignment_of_large`."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parameters in one flat buffer that ``ranks`` ranks own in equal contiguous pieces, made by ``FlatLayout.of``.

    Example:
        >>> layout = FlatLayout.of([6, 3], ranks=2, align=4)
        >>> layout.offsets, layout.piece, layout.total      # 2 and 5 elements of padding
        ((0, 8), 8, 16)
        >>> layout.units(0), layout.units(1)
        ((6, 0), (0, 3))

    Attributes:
        numels: number of elements of each parameter.
        ranks: number of ranks.
        offsets: start of each parameter in the buffer.
        piece: number of elements that each rank owns.
    """

    numels: tuple[int, ...]
    ranks: int
    offsets: tuple[int, ...]
    piece: int

    @staticmethod
    def of(numels: Sequence[int], ranks: int, *, align: int = 1, align_large: int = 1) -> FlatLayout:
        """Lay the parameters out in order.

        Args:
            numels: number of elements of each parameter.
            ranks: number of ranks.
            align: parameters and pieces start at multiples of this number of elements.
            align_large: the same of parameters of `LARGE` elements or more, and of pieces where there are such.

        Raises:
            ValueError: ``ranks`` or ``align`` below one.
        """
        if ranks < 1 or align < 1:
            raise ValueError(f"FlatLayout: ranks and align must be at least 1, got ranks={ranks}, align={align}")
        large = lcm(align, align_large)
        offsets = []
        end = 0
        for numel in numels:
            step = large if numel >= LARGE else align
            start = ceil(end / step) * step
            offsets.append(start)
            end = start + ceil(numel / align) * align
        step = large if max(numels, default=0) >= LARGE else align
        piece = ceil(end / (ranks * step)) * step
        return FlatLayout(tuple(numels), ranks, tuple(offsets), piece)

    @property
    def total(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.piece * self.ranks

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return the elements of parameter ``index`` on ``rank``: start and stop in the flattened parameter."""
        offset, numel = self.offsets[index], self.numels[index]
        start = min(max(rank * self.piece - offset, 0), numel)
        stop = min(max((rank + 1) * self.piece - offset, 0), numel)
        return start, stop

    def place(self, index: int, rank: int) -> tuple[int, int]:
        """Return the same elements as start and stop in the rank's piece; ``(0, 0)`` if it has none."""
        start, stop = self.part(index, rank)
        if start == stop:
            return 0, 0
        shift = self.offsets[index] - rank * self.piece
        return start + shift, stop + shift

    def units(self, index: int) -> tuple[int, ...]:
        """Return the number of elements of parameter ``index`` on each rank."""
        return tuple(stop - start for start, stop in (self.part(index, rank) for rank in range(self.ranks)))

    def splits(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes that split the rank's piece into ranges, and for each parameter the index of its range.

        Gaps of padding are ranges as well; a parameter of which the rank owns nothing has an empty range.

        Example:
            >>> FlatLayout.of([6, 3], ranks=2, align=4).splits(0)
            ((6, 0, 2), (0, 1))
        """
        sizes: list[int] = []
        indices: list[int] = []
        end = 0
        for index in range(len(self.numels)):
            start, stop = self.place(index, rank)
            if start > end:
                sizes.append(start - end)
            indices.append(len(sizes))
            sizes.append(stop - start)
            end = max(end, stop)
        if end < self.piece:
            sizes.append(self.piece - end)
        return tuple(sizes), tuple(indices)


BLOCK = 1024
"""Deterministic mode shards parameters between blocks of this many elements; norms are sums over blocks."""
