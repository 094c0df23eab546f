"""Which ranks tell which others what all must know, in two exchanges.

Note [Relays]
    That a gradient is missing, or not finite, on one rank concerns all of them. If each told each, there would be a
    message between any two of them, where ragged shards need a few. So ranks are numbered row by row in a square: in
    the first exchange each tells those of its row, in the second one each tells its column what its row knows. Of a
    last row that is shorter, members stand in for the columns that it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True)
class Relays:
    """To which places a rank sends what it knows, and from which it hears.

    Attributes:
        first_to: for each place, whether this rank sends to it in the first exchange.
        first_from: the same of what arrives.
        second_to: of the second exchange.
        second_from: the same of what arrives.
    """

    first_to: tuple[bool, ...]
    first_from: tuple[bool, ...]
    second_to: tuple[bool, ...]
    second_from: tuple[bool, ...]

    @staticmethod
    def of(place: int, places: int) -> Relays:
        """Return those of a place among so many; see Note [Relays]."""
        width = isqrt(places - 1) + 1

        def speaks(source: int, target: int) -> bool:
            row, column = divmod(source, width)
            return source != target and target % width % min(width, places - row * width) == column

        row = tuple(other // width == place // width and other != place for other in range(places))
        return Relays(
            row,
            row,
            tuple(speaks(place, other) for other in range(places)),
            tuple(speaks(other, place) for other in range(places)),
        )
