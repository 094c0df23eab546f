"""Where the rows of an exchange go, and in what order they are when they are there: integers, no framework.

Note [The order of rows]
    A rank sends a row for each token and chosen expert, ordered by (destination, expert there, token, choice). What
    arrives is ordered by (source, expert, token); the experts compute it in the order (expert, source, token), so that
    the sum over an expert's rows, its weight's gradient, is a sum over sources in their order. Results go back the way
    their rows came.

Note [What ranks tell each other]
    Before the rows, each rank tells each other the rows for each of its experts, the copies of tokens, the settings of
    its style, and what is wrong with its inputs. So all ranks know of a bad input before any of them sends a row, and
    raise alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["COMBINES", "DISPATCHERS", "TOLD", "Dispatch", "Message", "refusal", "settings"]

DISPATCHERS: tuple[str, ...] = ("all_to_all", "all_gather", "deredundency")
COMBINES: tuple[str, ...] = ("fast", "exact")

TOLD: tuple[str, ...] = ("copies", "hidden", "choices", "dispatcher", "combine", "unknown", "infinite")
"""What follows the rows for each expert in a rank's message to another."""


def settings(token_dispatcher: str, combine: str) -> tuple[int, int]:
    """Write a style's settings as the numbers that ranks tell each other: they exchange alike, or not at all."""
    return DISPATCHERS.index(token_dispatcher), COMBINES.index(combine)


@dataclass(frozen=True)
class Dispatch:
    """One exchange, as one rank sees it: Note [The order of rows].

    Attributes:
        sent: rows to each rank.
        received: rows from each rank.
        sizes: rows of each expert that this rank computes, over all sources.
        blocks: (first row, rows) of what has arrived, in the order in which it is computed.
        copies_sent: tokens that go to each rank once, whatever the number of their experts there.
        copies_received: the same from each rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    copies_sent: tuple[int, ...]
    copies_received: tuple[int, ...]

    @classmethod
    def of(
        cls,
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        copies_sent: Sequence[int] = (),
        copies_received: Sequence[int] = (),
    ) -> Dispatch:
        """Plan an exchange.

        Args:
            sent: for each rank the rows for each of its experts.
            received: from each rank the rows for each of this rank's experts.
            copies_sent: see ``Dispatch``.
            copies_received: see ``Dispatch``.
        """
        width = len(received[0])
        ends = list(itertools.accumulate(itertools.chain.from_iterable(received), initial=0))
        return cls(
            tuple(map(sum, sent)),
            tuple(map(sum, received)),
            tuple(map(sum, zip(*received, strict=True))),
            tuple(
                (ends[source * width + expert], received[source][expert])
                for expert in range(width)
                for source in range(len(received))
            ),
            tuple(copies_sent),
            tuple(copies_received),
        )

    @property
    def sorted(self) -> bool:
        """Tell whether what arrives is in the order in which it is computed."""
        filled = [first for first, rows in self.blocks if rows]
        return filled == sorted(filled)


class Message:
    """What one rank told another: Note [What ranks tell each other].

    Attributes:
        rows: for each of the receiver's experts.
        told: by the names of ``TOLD``.
        further: numbers that a route adds.
    """

    def __init__(self, numbers: Sequence[int], width: int) -> None:
        end = width + len(TOLD)
        self.rows, self.further = numbers[:width], numbers[end:]
        self.told = dict(zip(TOLD, numbers[width:end], strict=True))


def refusal(name: str, experts: int, received: Sequence[Message]) -> str | None:
    """Say what is wrong with the inputs of a layer on any rank, the same on all; None if nothing is.

    Args:
        name: of the module of experts.
        experts: their number, over all ranks.
        received: each rank's message: Note [What ranks tell each other].
    """
    told = [message.told for message in received]
    problems = []
    for rank, each in enumerate(told):
        for key, what in (("hidden", "tokens of size"), ("choices", "choices a token")):
            if each[key] != told[0][key]:
                problems.append(f"rank {rank} has {what} {each[key]}, rank 0 {told[0][key]}")
        if any(each[key] != told[0][key] for key in ("dispatcher", "combine")):
            problems.append(
                f"rank {rank} runs with {_written(each)}, rank 0 with {_written(told[0])}: give all ranks one style"
            )
        if each["unknown"]:
            problems.append(
                f"rank {rank} chose {each['unknown']} experts that are none of {experts}: their numbers go from 0 to"
                f" {experts - 1}"
            )
        if each["infinite"]:
            problems.append(f"rank {rank} has {each['infinite']} weights that are not finite: look at the router")
    return f"{name}: {'; '.join(problems)}." if problems else None


def _written(told: Mapping[str, int]) -> str:
    """Write the settings in a message as the arguments that they were."""
    return f"token_dispatcher={DISPATCHERS[told['dispatcher']]!r}, combine={COMBINES[told['combine']]!r}"
