"""`[optimizer]` and `[schedule]`: how weights are changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_optim.extend import decayed
from hp_plan.sections.bounds import at_least, each_within, more_than, within


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters with values of their own, in an array of tables. A parameter is in one group at most.

    Attributes:
        patterns: of the parameters, such as `"model.layers.*.*norm.weight"`.
        weight_decay: theirs; none takes the optimizer's.
        lr_multiple: their learning rate, as a multiple of the optimizer's, at each step of the schedule.
    """

    patterns: tuple[str, ...] = ()
    weight_decay: float | None = at_least(0.0, None)
    lr_multiple: float = more_than(0.0, 1.0)


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer and its constants.

    Attributes:
        name: `adamw`, `sgd`, `muon`, or `adamw8bit`: AdamW with states of eight bits.
        lr: the learning rate at the schedule's top.
        betas: AdamW's averaging of the gradient and of its square.
        eps: AdamW's divisor offset.
        weight_decay: decoupled for AdamW and Muon, added to the gradient for SGD.
        momentum: SGD's.
        muon: of `muon`, patterns of the parameters that Muon trains; AdamW trains the others. None means the hidden
            matrices: all but embeddings, output layers, norms and biases.
        muon_momentum: Muon's averaging of the gradient.
        groups: parameters with a weight decay or a learning rate of their own.
        swap_slices: of `adamw` and `muon`, keep states on the host, and bring them to the device in so many slices of a
            step; 0 keeps them on the device.
    """

    name: Literal["adamw", "sgd", "muon", "adamw8bit"] = "adamw"
    lr: float = more_than(0.0, 1e-3)
    betas: tuple[float, float] = each_within(0.0, 1.0, (0.9, 0.999))
    eps: float = more_than(0.0, 1e-8)
    weight_decay: float = at_least(0.0, 0.01)
    momentum: float = at_least(0.0, 0.0)
    muon: tuple[str, ...] = ()
    muon_momentum: float = within(0.0, 1.0, 0.95)
    groups: tuple[OptimizerGroup, ...] = ()
    swap_slices: int = at_least(0, 0)


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the run: up from 0 in `warmup_steps`, then by `kind` down to `final * lr`.

    Attributes:
        kind: `constant`, `linear`, `cosine` or `wsd`: warm up, stay, decay over the last `decay_steps`.
        warmup_steps: optimizer steps until the learning rate is the optimizer's.
        final: the last learning rate as a part of the optimizer's (no use for `constant`).
        decay_steps: of `wsd`; 0 is a tenth of the run.
        decay: of `wsd`, the shape: `linear`, `cosine`, `exponential` or `minus_sqrt`.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = at_least(0, 0)
    final: float = at_least(0.0, 0.0)
    decay_steps: int = at_least(0, 0)
    decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"


def schedule_factor(section: ScheduleSection, step: int, steps: int) -> float:
    """Return the factor of the learning rate at step `step` (from 0) of `steps`.

    >>> [schedule_factor(ScheduleSection("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    if section.kind == "constant":
        return 1.0
    start = section.warmup_steps
    if section.kind == "wsd":
        start = max(start, steps - (section.decay_steps or max(1, steps // 10)))
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    falling = decayed(section.decay if section.kind == "wsd" else section.kind, progress)
    return section.final + (1.0 - section.final) * falling
