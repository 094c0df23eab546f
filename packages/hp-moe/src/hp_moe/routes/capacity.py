"""Static shapes: so many seats of each expert for each rank, and choices that find none are dropped.

Note [Seats]
    Each expert has ``capacity`` seats for the tokens of each rank. A rank's choices take them in order, token by token
    and for each by choice; of a full expert the last are dropped: they add nothing to their token's sum. Empty seats
    travel as zeros. So shapes depend on nothing that is computed, and the host waits for no counts; ranks tell each
    other what they have in common (dtypes, choices a token, the style) in the first call of each kind alone. A number
    that is none of the experts makes the results of its rank infinite or not a number, as there is no exchange in
    which all ranks could hear of it; shapes and dtypes that do not fit are refused on their rank alone. On CPUs, which
    wait for each other anyway, ranks tell each other what they have in common in every call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from hp_moe.port import port
from hp_moe.routes.dispatch import Message
from hp_moe.routes.routes import Route, begun

Tensor = Any
_log = logging.getLogger("hp_moe")


class Drops(NamedTuple):
    """The choices that experts without a seat left have dropped on this rank.

    Attributes:
        dropped: choices, for each expert.
        choices: of all, dropped or not.
    """

    dropped: tuple[int, ...]
    choices: int


class Seated(Route):
    """A row for each seat: Note [Seats].

    Args:
        slots, choices, widths, group: see ``Route``.
        capacity: seats of each expert for this rank's tokens.
        own: how many experts this rank computes.
        wrong: how many choices are none of the experts.

    Attributes:
        dropped: choices without a seat, for each expert that ranks compute.
    """

    def __init__(
        self, slots: Tensor, choices: int, widths: Sequence[int], group: Any, capacity: int, own: int, wrong: Tensor
    ) -> None:
        super().__init__(slots, choices, widths, group)
        self.seats, self.taken, self.dropped = port().seats(slots, sum(widths), capacity)
        self.capacity, self.own, self.wrong = capacity, own, wrong
        self.sent, self.received = [capacity * width for width in widths], [capacity * own] * len(widths)
        self.sizes = (capacity * len(widths),) * own

    def plan(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        """Do nothing: shapes are static."""

    def begin_dispatch(self, tokens: Tensor, weights: Tensor) -> None:
        f, self.weights = port(), weights
        rows = f.take(f.padded(tokens, len(tokens) + 1), self.taken // self.choices)  # empty seats take the last row
        self.way = begun(self.launch[0], self.group, [self.sent], [self.received], rows, ahead=self.ahead)

    def end_dispatch(self) -> Tensor:
        (rows,) = self.way[0].end(*self.way[1])
        return self._turned(rows, len(self.widths), self.own)

    def begin_combine(self, rows: Tensor) -> None:
        rows = self._turned(rows, self.own, len(self.widths))
        self.way = begun(self.launch[1], self.group, [self.received], [self.sent], rows)

    def end_combine(self) -> Tensor:
        f = port()
        (rows,) = self.way[0].end(*self.way[1])
        weights = f.spoiled(f.cast(self.weights, rows), self.wrong)
        each = f.take(f.padded(rows, len(rows) + 1), self.seats).reshape(*weights.shape, rows.shape[1])
        return (each * weights.reshape(*weights.shape, 1)).sum(1)

    def _turned(self, rows: Tensor, outer: int, inner: int) -> Tensor:
        """Order rows by the inner of two numbers: source and expert."""
        return rows.reshape(outer, inner, self.capacity, -1).swapaxes(0, 1).reshape(*rows.shape)


class DropCount:
    """Choices that a layer has dropped since they were last read; no wait of the host until then."""

    def __init__(self) -> None:
        self.dropped: Tensor | None = None
        self.choices = 0

    def add(self, route: Seated) -> None:
        """Count those of a call."""
        self.choices += len(route.seats)
        self.dropped = route.dropped if self.dropped is None else self.dropped + route.dropped

    def read(self, slots: Sequence[int]) -> Drops:
        """Return the counts and begin anew.

        Args:
            slots: of each expert its place among all that ranks compute.
        """
        dropped, choices, self.dropped, self.choices = self.dropped, self.choices, None, 0
        each = [0] * len(slots) if dropped is None else port().listed(dropped)
        return Drops(tuple(each[slot] for slot in slots), choices)


def report_drops(model: Any) -> dict[str, Drops]:
    """Return what each module of experts has dropped on this rank in training since the last call; counts begin anew.

    The host waits for the counts here alone. The logger ``hp_moe`` warns of each module that has dropped any.

    Args:
        model: with modules of experts under ``ExpertParallel(capacity=...)``.

    Returns:
        The counts, by the names of the modules.
    """
    drops: dict[str, Drops] = {}
    for name, module in port().named_modules(model):
        layer = getattr(module, "_expert_layer", None)
        if layer is None or layer.style.capacity is None:
            continue
        drops[name] = own = layer.drops.read(layer.slots)
        if sum(own.dropped):
            _log.warning(
                "%s: dropped %d of %d choices at capacity %d, most of expert %d",
                *(name or layer.own.name, sum(own.dropped), own.choices, layer.style.capacity),
                max(range(len(own.dropped)), key=own.dropped.__getitem__),
            )
    return drops
