"""``fill_`` and ``zero_``: the parts of a Partial are written so that their reduction is the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.layout.placements import Partial, Replicate
from hp_dtensor.rules.factors import NoLegalPlacement, Solution
from hp_dtensor.torch.ops.local import Elsewhere

if TYPE_CHECKING:
    from hp_dtensor.rules.planning import Call


def solve(call: Call, shapes: list[tuple[int, ...]]) -> Solution:
    """Keep the written operand's placements; a value that is a DTensor is replicated.

    Raises:
        NoLegalPlacement: a sum on one axis is a product on another.
    """
    written = call.specs[0].placements
    ops = {p.reduce_op for p in written if isinstance(p, Partial)}
    if "product" in ops and ops & {"sum", "avg"}:
        raise NoLegalPlacement(
            f"no parts of {written} have a given value; reduce_partial() the operand that is written first"
        )
    # each part of a sum gets the gradient of the whole sum, see Elsewhere
    varies = tuple(not p.is_replicate() and not p.is_partial("sum") for p in written)
    others = len(call.specs) - 1
    return Solution(
        (written, *((Replicate(),) * len(written),) * others),
        ((False,) * len(written), *(varies,) * others),
        (written,),
    )


def fill(call: Call) -> Any:
    """Return this rank's fill value; in a partial sum or product only the first rank gets it, the others 0 or 1."""
    placements, coordinate = call.results[0].placements, call.results[0].mesh.get_coordinate()
    combined = [a for a, p in enumerate(placements) if p.is_partial("sum") or p.is_partial("product")]
    if coordinate is None or not any(coordinate[axis] for axis in combined):
        return None
    neutral = 1 if any(p.is_partial("product") for p in placements) else 0

    def run(x: torch.Tensor, value: Any = 0) -> torch.Tensor:
        return x.fill_(Elsewhere.apply(value) + neutral if isinstance(value, torch.Tensor) else neutral)

    return run
