"""Tokens that go where numbers say and not where routers send them, to measure, or where tensors have no values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

Counts = Callable[[int, int, int], Sequence[int]]
"""Returns how many of `tokens * choices` each of `experts` gets, of these three numbers; none gets a token twice."""

_forced: list[Counts] = []


@contextlib.contextmanager
def forced_routes(counts: Counts) -> Iterator[None]:
    """Send so many tokens to each expert, whatever routers choose; weights stay theirs.

    Example:
        >>> with forced_routes(balanced):
        ...     step()  # what it would take if all experts got as many tokens

    Args:
        counts: `balanced`, what `skewed` returns, or a function of one's own.
    """
    _forced.append(counts)
    try:
        yield
    finally:
        _forced.remove(counts)


def forced_counts(tokens: int, choices: int, experts: int) -> Sequence[int] | None:
    """Return the tokens of each expert where routes are forced, else None.

    Args:
        tokens: number of tokens.
        choices: experts of each token.
        experts: number of experts.

    Raises:
        ValueError: the function's counts are not those of so many tokens.
    """
    if not _forced:
        return None
    counts = list(_forced[-1](tokens, choices, experts))
    if len(counts) != experts or sum(counts) != tokens * choices or max(counts, default=0) > tokens:
        raise ValueError(
            f"forced_routes: counts {counts} are not those of {tokens} tokens with {choices} of {experts} experts each,"
            f" which add up to {tokens * choices} and are at most {tokens}"
        )
    return counts


def balanced(tokens: int, choices: int, experts: int) -> list[int]:
    """Give each expert as many tokens, the first ones one more where they do not divide.

    Args:
        tokens: number of tokens.
        choices: experts of each token.
        experts: number of experts.
    """
    each, more = divmod(tokens * choices, experts)
    return [each + (expert < more) for expert in range(experts)]


def skewed(factor: float) -> Counts:
    """Return counts of which the first expert has a multiple of the mean, falling evenly to the last.

    Args:
        factor: the first expert's tokens over the mean, from 1 (balanced) to 2; at 2 the last has none.

    Raises:
        ValueError: another factor.
    """
    if not 1 <= factor <= 2:
        raise ValueError(f"skewed: a factor of {factor} is not from 1 to 2")

    def counts(tokens: int, choices: int, experts: int) -> list[int]:
        total, mean = tokens * choices, tokens * choices / experts
        slope = 2 * (factor - 1) / max(experts - 1, 1)
        wanted = [min(int(mean * (factor - slope * expert)), tokens) for expert in range(experts)]
        left = total - sum(wanted)
        while left:  # what rounding and the limit of a token once left over
            for expert in range(experts):
                if left and wanted[expert] < tokens:
                    wanted[expert] += 1
                    left -= 1
        return wanted

    return counts
