"""Where a number that is not finite was born."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PHASES = ("weight", "forward", "backward", "gradient")


@dataclass(frozen=True, slots=True)
class Origin:
    """The first NaN or infinity of a step.

    Attributes:
        phase: "weight" (a parameter had it before the step), "forward", "backward", or "gradient" (no module returned
            it, and yet the gradient of a parameter has it: a sum of gradients, over ranks or micro-batches, is the
            first that does).
        name: of the module or the parameter; empty is the model itself.
        rank: that had it first.
        micro: the number of the micro-batch.
        element: its place in this rank's part of the tensor.
        value: not a number, or infinite.
        beside: the elements before and after it in the last dim, two of each at most.
        inputs_finite: the module made it of finite numbers. False: it was in what the module was called with, or in
            the gradient that came to it, from code outside of modules.
        others: ranks that had it in the same place of their step, as where a collective inside of the module gives it
            to all of them.
        order: of origins on several ranks: micro-batch, stage in the order in which they run, number of modules before.
    """

    phase: str
    name: str
    rank: int
    micro: int
    element: tuple[int, ...]
    value: float
    beside: tuple[float, ...]
    inputs_finite: bool
    others: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        number = "NaN" if math.isnan(self.value) else f"{self.value}"
        beside = ", ".join(f"{value:.4g}" for value in self.beside) or "nothing"
        named, rank = self.name or "the model itself", f"rank {self.rank}"
        if self.others:
            rank += f" (and as early on {', '.join(map(str, self.others[:4]))})"
        place = f"element {list(self.element)} of this rank's part, beside {beside}"
        if self.phase in ("weight", "gradient"):
            return f"the first {number} is in the {self.phase} of {named} on {rank}, {place}"
        what = "output" if self.phase == "forward" else "input's gradient"
        if not self.inputs_finite:
            what = "input" if self.phase == "forward" else "output's gradient"
        made = ", made of finite numbers" if self.inputs_finite else ", which other code than a module's has made"
        return (
            f"the first {number} is in the {self.phase} of {named} on {rank}, micro-batch {self.micro}: {place} in its"
            f" {what}{made}"
        )


def earliest(origins: Sequence[Origin | None]) -> Origin | None:
    """Return the earliest of the ranks' origins, which names those that are as early."""
    found = [each for each in origins if each is not None]
    if not found:
        return None

    def key(origin: Origin) -> tuple[Any, ...]:
        return PHASES.index(origin.phase), *origin.order

    first = min(found, key=lambda each: (*key(each), each.rank))
    same = tuple(each.rank for each in found if key(each) == key(first) and each.rank != first.rank)
    return Origin(**{**asdict(first), "others": same})


def encode(origin: Origin | None) -> bytes:
    """Return an origin as bytes for other ranks."""
    return json.dumps(None if origin is None else asdict(origin)).encode()


def decode(data: bytes) -> Origin | None:
    """Return the origin of another rank."""
    values = json.loads(data)
    return None if values is None else Origin(**{each: _listed(value) for each, value in values.items()})


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
