"""Where a line of units is cut into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Unit:
    """A part of a model that is not cut: a block, or all that runs before or after the blocks.

    Attributes:
        names: the modules in it, by their names in the model.
        forward: its cost in a forward of one micro-batch: seconds, or operations where they are counted.
        input: in the backward for its inputs.
        weight: in the backward for its weights.
        saved: bytes that its forward saves for its backward.
        parameters: bytes of its parameters.
    """

    names: tuple[str, ...]
    forward: float
    input: float
    weight: float
    saved: float = 0.0
    parameters: int = 0

    @property
    def total(self) -> float:
        """The cost of a forward and a backward."""
        return self.forward + self.input + self.weight


def partition(
    costs: Sequence[float], stages: int, sizes: Sequence[float] | None = None, limit: float | None = None
) -> tuple[int, ...]:
    """Cut a line of blocks into stages so that the slowest stage takes the least time; exact.

    The least time of the slowest of `k` stages that end before block `n` is the least, over the last cut, of the
    greater of the two sides. Where several are equal, the one whose stages have the lesser sum of squares is preferred.

        partition([1, 1, 1, 3], 2)  # (3, 1)

    Args:
        costs: of each block; what runs before the first and after the last is added to those.
        stages: how many, at least 1; each gets at least one block.
        sizes: bytes of each block.
        limit: bytes that no stage may pass.

    Returns:
        The number of blocks of each stage.

    Raises:
        ValueError: more stages than blocks, or no cut within the limit.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{stages} stages cannot be cut out of {count} blocks: a stage takes at least one.")
    time = [0.0, *accumulate(costs)]
    size = [0.0, *accumulate(sizes or [0.0] * count)]
    bound = math.inf if limit is None else limit
    # rows[k][n]: slowest stage, sum of squares and last cut of the best k stages of the first n blocks.
    rows: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0), *[(math.inf, math.inf, 0)] * count]]
    for _ in range(stages):
        row = [(math.inf, math.inf, 0)]
        for end in range(1, count + 1):
            best = (math.inf, math.inf, 0)
            for cut in range(end - 1, -1, -1):
                own = time[end] - time[cut]
                if own > best[0] or size[end] - size[cut] > bound:
                    break  # longer stages only take more
                slowest, squares, _ = rows[-1][cut]
                best = min(best, (max(slowest, own), squares + own * own, cut))
            row.append(best)
        rows.append(row)
    if rows[-1][count][0] == math.inf:
        largest = max(sizes or [0.0])
        raise ValueError(
            f"no cut of {count} blocks into {stages} stages keeps each stage within {limit} bytes: the blocks take"
            f" {size[-1]:.0f} bytes in all, the largest {largest:.0f}; raise the limit or the number of stages."
        )
    counts, end = [], count
    for row in reversed(rows[1:]):
        cut = row[end][2]
        counts.append(end - cut)
        end = cut
    return tuple(reversed(counts))
