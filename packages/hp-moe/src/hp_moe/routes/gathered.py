"""All tokens to all ranks, for few ranks: each takes those of its experts, and sums go back where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_moe.port import port
from hp_moe.routes.dispatch import Dispatch, Message
from hp_moe.routes.routes import Route
from hp_platform import get_platform

Tensor = Any


class Gathered(Route):
    """An all-gather of tokens and a reduce-scatter of results.

    Of as many bytes as ranks times tokens, whatever the choices: as few as copies where most tokens go to most ranks.
    Ranks with fewer tokens than others send rows of zeros.
    """

    def __init__(self, slots: Tensor, choices: int, widths: Sequence[int], group: Any) -> None:
        super().__init__(slots, choices, widths, group)
        self.slots, self.tokens = slots.reshape(-1, choices), len(slots) // choices

    def copies(self) -> Sequence[tuple[int, ...]]:
        return [(self.tokens,)] * len(self.widths)

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        self.longest = max(each.told["copies"] for each in received)
        self.sizes = Dispatch.of([each.rows for each in sent], [each.rows for each in received]).sizes

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        f = port()
        self.copied, self.own, slots = (
            f.gathered(f.padded(each, self.longest), self.group) for each in (tokens, weights, self.slots + 1)
        )
        rank = get_platform().groups.rank(self.group)
        first = 1 + sum(self.widths[:rank])  # 0 is padding
        self.entries = f.ordered_range(slots.reshape(-1), first, self.widths[rank], sum(self.sizes))

    def end_dispatch(self) -> Tensor:
        f = port()
        self.places, self.scale = self.entries // self.choices, f.take(self.own.reshape(-1, 1), self.entries)
        return f.take(self.copied, self.places)

    def begin_combine(self, rows: Tensor) -> None:
        self.sums = port().summed(rows, self.places, self.longest * len(self.widths))

    def end_combine(self) -> Tensor:
        return port().scattered(self.sums, self.group)[: self.tokens]
