"""A training whose loss or gradients are no numbers any more."""

from __future__ import annotations

import math
from pathlib import Path

from hyper_parallel.reports.output import weights_option


class DivergedError(RuntimeError):
    """A step whose loss or gradients are infinite or not a number: its weights are worth nothing, and are not saved."""


def check_finite(step: int, loss: float, norm: float, *, saved: str | None) -> None:
    """Raise where a step has spoiled the weights.

    Args:
        step: which.
        loss: of all ranks.
        norm: of all gradients, before clipping.
        saved: the newest checkpoint, which is of a step before; None without one.

    Raises:
        DivergedError: the loss or the norm is not finite.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    spoiled = not math.isfinite(loss)
    what = f"the loss of step {step} is {loss}" if spoiled else f"the gradients of step {step} have norm {norm}"
    kept = "there is no checkpoint yet" if saved is None else f"the newest checkpoint is {saved}"
    fix = "start again with a smaller optimizer.lr, with run.grad_clip or with schedule.warmup_steps"
    if saved is not None:
        fix += f", from its weights by {weights_option(Path(saved))}"
    raise DivergedError(f"{what}, so the weights after it are worth nothing and are not saved; {kept}; {fix}")
